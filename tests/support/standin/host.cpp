// The host's side: stacks and places in Python, counted synchronisations, and operations of the CPU on pinned memory.
#include "standin.h"

#include <Python.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <sstream>

namespace standin {

namespace {
constexpr int kFrames = 8;  // of a stack, in a message
thread_local int kernels = 0;
std::map<std::pair<std::string, std::string>, int64_t> counted;

// Of Python's library and what is installed, and of the device itself.
bool of_library(const std::string& file) {
  return file.find("/lib/python3") != std::string::npos || file.find("/support/standin/") != std::string::npos ||
      file.rfind('<', 0) == 0;
}

std::string text_of(PyObject* object) {
  const char* text = object ? PyUnicode_AsUTF8(object) : nullptr;
  return text ? text : "?";
}

// The innermost frame of the plugin; without one, the innermost that is no library's.  Under Python's lock.
std::string find_place() {
  std::string script;
  auto* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame) {
    auto* code = PyFrame_GetCode(frame);
    const auto file = text_of(code->co_filename);
    const bool plugin = file.find("/recycle_plugin/") != std::string::npos && !of_library(file) &&
        file.find("/tests/") == std::string::npos;
    if (plugin || (script.empty() && !of_library(file))) {
      script = file + ":" + std::to_string(PyFrame_GetLineNumber(frame)) + " " + text_of(code->co_qualname);
    }
    Py_DECREF(code);
    auto* outer = plugin ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  return script.empty() ? "a thread without Python" : script;
}

std::string place() {
  if (!Py_IsInitialized())
    return "the end of the process";
  const auto state = PyGILState_Ensure();
  auto found = find_place();
  PyGILState_Release(state);
  return found;
}

// Which arguments an operation writes to, reads, or only looks at the shape of.
enum class Use { kRead, kWrite, kNone };
struct Operation {
  bool leaf = false;  // it touches memory itself, and not by other operations
  std::vector<Use> uses;
};

Operation look_up(const c10::OperatorName& name) {
  Operation found;
  const auto op = c10::Dispatcher::singleton().findSchema(name);
  if (!op)
    return found;
  found.leaf = op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || name.name == "aten::copy_";
  for (const auto& argument : op->schema().arguments()) {
    const auto* alias = argument.alias_info();
    found.uses.push_back(!alias ? Use::kRead : alias->isWrite() ? Use::kWrite : Use::kNone);
  }
  return found;
}

const Operation& operation(const c10::OperatorName& name) {
  thread_local std::unordered_map<c10::OperatorName, Operation> known;
  auto found = known.find(name);
  if (found == known.end())
    found = known.emplace(name, look_up(name)).first;
  return found->second;
}

template <class Visit>
void each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined())
      visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorVector())
      if (each.defined())
        visit(each);
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef())
      each_tensor(each, visit);
  }
}

bool in_pinned_memory(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.has_storage() && maybe_pinned(tensor.storage().data());
}

std::unique_ptr<at::ObserverContext> seen(const at::RecordFunction& function) {
  if (InKernel::active())
    return nullptr;
  bool pinned = false, device = false;
  for (const auto& value : function.inputs())
    each_tensor(value, [&](const at::Tensor& tensor) {
      pinned |= in_pinned_memory(tensor);
      device |= on_device(tensor);
    });
  // Operations of the device see to pinned tensors themselves.
  if (!pinned || device)
    return nullptr;
  const auto name = function.operator_name();
  if (!name)
    return nullptr;
  const auto& known = operation(*name);
  if (!known.leaf)
    return nullptr;
  const auto trace = capture();
  Lock lock;
  const auto work = submit(name->name, kHost, trace);
  for (size_t i = 0; i < known.uses.size() && i < function.inputs().size(); ++i)
    if (known.uses[i] != Use::kNone)
      each_tensor(function.inputs()[i], [&](const at::Tensor& tensor) {
        if (!in_pinned_memory(tensor))
          return;
        if (const auto block = block_at(tensor.storage().data()))
          // What an observer raises is swallowed.
          if (auto conflict = touch(*block, ranges_of(tensor), known.uses[i] == Use::kWrite, work))
            remember(std::move(*conflict));
      });
  return nullptr;
}
}  // namespace

InKernel::InKernel() {
  ++kernels;
}

InKernel::~InKernel() {
  --kernels;
}

bool InKernel::active() {
  return kernels > 0;
}

Trace capture() {
  if (!settings().stacks || !Py_IsInitialized())
    return nullptr;
  return torch::CapturedTraceback::gather(true, false, false);
}

std::string describe(const Trace& trace) {
  std::ostringstream out;
  int said = 0;
  if (trace) {
    const auto found = torch::symbolize({trace.get()});
    for (const auto index : found.tracebacks.at(0)) {
      const auto& frame = found.all_frames[index];
      if (of_library(frame.filename) || said == kFrames)
        continue;
      out << "    " << frame.filename << ":" << frame.lineno << " in " << frame.funcname << "\n";
      ++said;
    }
  }
  if (!said)
    out << "    a thread without Python, as that of a backward pass\n";
  return out.str();
}

void watch_host() {
  static const auto watching = at::addGlobalCallback(
      at::RecordFunctionCallback(seen).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  (void)watching;
}

void count_synchronisation(const std::string& kind) {
  const auto where = place();
  Lock lock;
  ++counted[{kind, where}];
}

std::map<std::pair<std::string, std::string>, int64_t> synchronisations() {
  Lock lock;
  return counted;
}

void reset_synchronisations() {
  Lock lock;
  counted.clear();
}

}  // namespace standin
