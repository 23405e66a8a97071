// What Python gets.
#include "standin.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>
#include <pybind11/stl.h>

namespace py = pybind11;
using namespace standin;

namespace {
void configure(bool clocks, bool stacks, std::optional<uint64_t> late) {
  py::gil_scoped_release released;
  Lock lock;
  if (!late)  // nothing stays behind for a mode in which nobody would run it
    for (Agent agent = 1; agent <= last_agent(); ++agent)
      settle(clock_of(agent));
  settings() = {clocks, stacks, late};
}

void host_access(const at::Tensor& tensor, bool write) {
  py::gil_scoped_release released;
  raise_remembered();
  const auto trace = capture();
  std::optional<Conflict> conflict;
  {
    Lock lock;
    if (const auto block = block_at(tensor.storage().data()))
      conflict = touch(*block, ranges_of(tensor), write, submit("access of the host", kHost, trace));
  }
  if (conflict)
    raise(*conflict);
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_hooks();
  m.def("configure", configure, py::arg("clocks"), py::arg("stacks"), py::arg("late"));
  m.def("host_access", host_access);
  m.def("check", raise_remembered, py::call_guard<py::gil_scoped_release>());
  m.def("violations", take_violations, py::call_guard<py::gil_scoped_release>());
  m.def("synchronisations", synchronisations, py::call_guard<py::gil_scoped_release>());
  m.def("reset_synchronisations", reset_synchronisations, py::call_guard<py::gil_scoped_release>());
  m.def("use", use);
  m.def("in_use", in_use);
  m.def("in_bad_fork", in_bad_fork);
  m.def("hold", hold, py::call_guard<py::gil_scoped_release>());
  m.def("let_go", let_go, py::call_guard<py::gil_scoped_release>());
  m.def("load_lazily", load_lazily);
  m.def("share_queues", share_queues, py::call_guard<py::gil_scoped_release>());
  m.def("pinned_bytes", pinned_bytes, py::call_guard<py::gil_scoped_release>());
  m.def("allocated", allocated, py::call_guard<py::gil_scoped_release>());
  m.def("most_allocated", most_allocated, py::call_guard<py::gil_scoped_release>());
  m.def("reset_most_allocated", reset_most_allocated, py::call_guard<py::gil_scoped_release>());
  m.def("capacity", capacity);
  m.def("device_count", device_count);
  m.def("default_generator", [](c10::DeviceIndex device) {
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(default_generator(device)));
  });
}
