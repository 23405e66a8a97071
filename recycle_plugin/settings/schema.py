"""The ``"recycle"`` section of the DeepSpeed JSON: strict, typed, frozen, and checked when it is read.

``Settings.from_section`` reads it. An error is one line that names the key and says what to write instead; the layers
below see plain values, never a config object. The schema is stated only here, and in ``sections`` for settings that are
objects: a test compares ``configs/recycle/default.yaml`` with it, and :func:`reference` prints it for the documents.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from recycle_plugin.authentication.tls import NoCertificate, Tls
from recycle_plugin.core.vocabulary import costs_file
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.costs_file import StageCosts
from recycle_plugin.core.vocabulary.deadlines import Deadlines
from recycle_plugin.core.vocabulary.faults import Fault, FaultScript
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.settings.contradictions import refuse_contradictions, refuse_shrinking
from recycle_plugin.settings.field_types import (
    BOOL,
    CAP,
    STRICT,
    Address,
    Bytes,
    Cap,
    Count,
    Faults,
    Folder,
    Norm,
    Number,
    Rejoin,
    Seconds,
    ShellCommand,
    setting,
)
from recycle_plugin.settings.sections import SECTIONS, CheckpointSettings, LogSettings
from recycle_plugin.settings.wording import FAULT, SettingsError, explained, kind, shown

COSTS = "the path of a file that has the costs of each stage, such as a traced run's costs.json"


class Settings(BaseModel):
    model_config = STRICT

    enabled: bool = setting(False, BOOL, "Switch the plugin on. False leaves the stock engine untouched.")
    split_backward: bool = setting(
        True,
        BOOL,
        "Compute weight gradients later than input gradients, so that other stages wait less. False: both at once.",
    )
    stagger_optimizer: bool = setting(
        True,
        BOOL,
        "Let each stage apply a step as soon as it has its gradients, and begin the next one. False: no stage"
        " applies a step before all have their gradients.",
    )
    reroute: bool = setting(
        True, BOOL, "Give a lost worker's micro-batches to the other replicas of its stage. False: a loss ends the job."
    )
    activation_cap: Cap = setting(
        None,
        CAP,
        "How many micro-batches one worker may hold at once: a number, a list with one for each stage, or "
        '"1f1b" (as few as stock). Null: the number of stages.',
    )
    norm: Norm = setting(
        True,
        'true or "deepspeed"',
        'The gradient norm by which gradients are clipped: true for that of the whole model, or "deepspeed" '
        "for what the stock engine computes.",
    )
    clip: Literal["sync", "validate"] = setting(
        "sync",
        '"sync" or "validate"',
        '"sync": each step waits for the norm of the whole model. "validate": a step is applied at once, '
        "and taken back and clipped if its norm turns out to be over gradient_clipping. If `clip` is left "
        'out, fp16 without gradient_clipping takes "validate".',
    )
    nonfinite: Literal["end", "skip"] = setting(
        "end",
        '"end" or "skip"',
        "What follows a gradient norm that is not finite, in jobs that compute the norm (gradient_clipping, "
        'or `clip` "validate"): "end" the job, or "skip" the step.',
    )
    loss_scaling: bool = setting(
        False,
        BOOL,
        "Scale losses in fp32 too, as the fp16 section says (dynamically by default), and skip steps that "
        "overflow. fp16 always does so.",
    )
    undo: Literal["snapshot", "host_snapshot", "inverse"] = setting(
        "snapshot",
        '"snapshot", "host_snapshot" or "inverse"',
        'How an uncommitted step is taken back. "snapshot": from an exact copy of the values that it '
        'changes, on the device. "host_snapshot": from a copy in host memory, made while the device '
        'computes. "inverse": by inverting the optimizer\'s rule, without a copy and up to rounding. Scripts '
        'that call forward and backward themselves keep no copy, unless `clip` is "validate".',
    )
    exact: Count | bool = setting(
        False,
        "true, false, or a whole number of at least 1",
        "Train to the same bits whichever worker fails: those of the exact run without a failure. The number "
        "is the size of a block: consecutive micro-batches of a replica (true: all of them) that stay on one "
        "worker, which adds their gradients. Small blocks reroute more freely; each block of a worker beyond "
        "its first takes one more buffer of the gradients' size.",
    )
    unit: Literal["worker", "replica"] = setting(
        "worker",
        '"worker" or "replica"',
        'The workers that are given up together after a loss, and come back together: "worker" (only the '
        'lost one; the other replicas of its stage take its work) or "replica" (its whole replica).',
    )
    replicas: Count | None = setting(
        None,
        "a whole number of at least 1, or null",
        'For jobs without a pipeline, with `unit` "replica": the number of replicas, at least 2. Each '
        "replica has neighbouring ranks, and DeepSpeed shards inside it by ZeRO.",
    )
    batch: Literal["constant", "shrink"] = setting(
        "constant",
        '"constant" or "shrink"',
        'What becomes of a lost replica\'s micro-batches, with `unit` "replica". "constant": the other '
        'replicas compute them. "shrink": nobody computes them. Sums are divided by the number of '
        "contributed micro-batches, each such step is applied with sqrt(live / all) of its learning rate, "
        'and no stage applies a step before all have their gradients. Under Hugging Face\'s loops "shrink" '
        "is implied.",
    )
    zero: Literal["replicate"] | None = setting(
        None,
        '"replicate" or null',
        'For `zero_optimization.stage` 1, whose shards of the optimizer\'s state have no copy. "replicate": '
        "every worker keeps the whole state (with Adam 12 bytes a parameter instead of 12 / replicas) and "
        "steps all of it. Null: stage 1 is refused.",
    )
    keep_bytes: Bytes = setting(
        None,
        'a whole number of at least 1, a size such as "2GiB", or null',
        "The most bytes of sent data that a worker keeps until the step is committed, as a number or a "
        'size; in host memory, or with `device_link` "nccl" on the accelerator. After a failure, data that '
        "was not kept is computed again. The event `peak` has the most bytes kept. Null: no limit.",
    )
    pinned_bytes: Bytes = setting(
        "4GiB",
        'a whole number of at least 1, a size such as "2GiB", or null',
        "How much host memory a worker with an accelerator may pin, for copies beside the computing. Beyond "
        "it, copies keep the worker waiting. Null: no limit.",
    )
    rng: Literal["keyed", "stream"] = setting(
        "keyed",
        '"keyed" or "stream"',
        '"keyed": dropout is drawn by step, replica, micro-batch and stage, so that another worker draws '
        'the same numbers. "stream": from the worker\'s own stream, as in stock; needs `reroute` false.',
    )
    seed: Number = setting(1234, "a whole number, not negative", "The seed of all keyed random numbers.")
    rebalance: Literal["lasting"] | bool = setting(
        "lasting",
        '"lasting", true or false',
        "Give less work to a worker that is 30% slower than its stage's others, until it no longer is: true, "
        'after three slow steps; "lasting", after half a minute more of them, if `unit` is "worker" and '
        "`reroute` is true. The worker of a micro-batch decides the order of sums. So without `exact` the "
        "last bits of the losses then depend on the workers' speed; false keeps them.",
    )
    rejoin: Rejoin = setting(
        "always",
        'a whole number, not negative, "always" or "never"',
        'Whether the process of a lost worker is started again: "always" (until 5 in a row have died before '
        'they were admitted), "never", or that many in a row. A process started with `--join` takes a lost '
        'seat in any case. Under Hugging Face\'s loops "never" is implied; any value may be set.',
    )
    leave_on: ShellCommand | None = setting(
        None,
        "a shell command, or null",
        "A command that asks whether the host is about to be taken away; each worker runs it every five "
        "seconds. Once it succeeds (exit code 0), the workers of its host leave at the next commit, and no "
        "process is started there any more. If the job can't go on without that host, it ends at that "
        "commit, with a checkpoint unless the script calls forward and backward itself. Null: no command.",
    )
    checkpoint_dir: Folder | None = setting(
        None,
        "a folder's path, or null",
        "The folder, shared by all hosts, for checkpoints that the script does not save itself. Null: those "
        "of `checkpoint` go to the run folder, and the last one of a job that is ended from outside goes to "
        "the folder of the script's last checkpoint.",
    )
    resume_iterators: bool = setting(
        False,
        BOOL,
        "After `load_checkpoint`, bring each replica's plain iterator to its place at the save, by its "
        "`load_state_dict` or by reading. False for scripts that skip by themselves, or begin anew.",
    )
    transfer_interface: str | None = setting(
        None,
        "the name of a network interface, an address of the host, or null",
        "The network interface of each host, by name or address, over which returning workers get their "
        "stage's state. Null: the one that reaches the coordinator.",
        min_length=1,
    )
    group_sums: Literal["warn", "scale", "raise"] = setting(
        "warn",
        '"warn", "scale" or "raise"',
        "What happens to a script's own sum over a process group that has lost members, whose size stays "
        'the same. "warn": a warning for each calling line that the sum lacks their part. "scale": each SUM '
        "is multiplied by all / live members, for counts and losses that the script divides by the world "
        'size; whole numbers are rounded to the nearest, halves up. "raise": the job ends. For an average '
        "over the live members: `recycle_plugin.mean(tensor, group)`.",
    )
    device_link: Literal["host", "nccl"] = setting(
        "host",
        '"host" or "nccl"',
        "The link for sums of gradients and of tied weights, the script's collectives on tensors of a GPU, "
        'and boundary tensors. "host": host memory, and Gloo or TCP. "nccl": NCCL, made anew after each '
        "loss; its sums were tried on one GPU, not on several, and its boundary tensors on none ([what has "
        "run where](supported.md#accelerators)). Other tensors, and with `exact` these too, pass through "
        "host memory either way.",
    )
    check_replicas: Number = setting(
        0,
        "a whole number, not negative",
        "The number of steps between two comparisons of hashes of the replicas' parameters, optimizer state, "
        "learning rates and counts. 0: compared only after a checkpoint is loaded.",
    )
    placement: Literal["deepspeed", "strict", "spread"] = setting(
        "deepspeed",
        '"deepspeed", "strict" or "spread"',
        'The hosts of the ranks. "deepspeed": as its launcher assigns them, with a warning if one host '
        'holds every replica of a stage. "strict": the same, but such a job is refused. "spread": assigned '
        "so that no host holds every replica of a stage; the section then has to be in the file that "
        "`--deepspeed_config` names on the command line.",
    )
    run_dir: Folder | None = setting(
        None,
        "a folder's path, or null",
        "The folder for events, traces and reports, of one job at a time. Null: the plugin chooses one.",
    )
    secret_file: Folder | None = setting(
        None,
        "a file's path, or null",
        "The file with the job's secret, by which its processes know each other: mode 0600, in a folder "
        "that all hosts share. Rank 0's host creates it if it does not exist, and then removes it at the "
        "end. The section has to be in the file that `--deepspeed_config` names on the command line; the "
        "environment's RECYCLE_SECRET_FILE takes precedence. Null: in this user's own folder on one host, "
        "and `secret` in `run_dir` on several.",
    )
    report: bool = setting(
        True, BOOL, "Write `report.html` to the run folder when the job ends. `recycle report` writes it at any time."
    )
    console: Literal["all", "quiet"] = setting(
        "all",
        '"all" or "quiet"',
        'Which events the console shows; the run folder has all. "quiet", for jobs of many workers: losses '
        "and returns, errors, checkpoints, the end, and, if the console is not a terminal, one step a "
        "minute.",
    )
    trace: bool = setting(False, BOOL, "Write every executed instruction with its times to the run folder.")
    faults: Faults = setting(
        (),
        f"a list of faults such as [{FAULT}]",
        "Faults to inject, each at a named instruction or point, to measure their cost for your job.",
    )
    heartbeat_timeout_s: Seconds = setting(
        15.0,
        "a number of seconds, at least 2",
        "A host that is silent for this long is given up with its workers. A worker that hears nothing from "
        "the coordinator for eight times as long ends. A shorter time finds a lost host sooner, but costs a "
        "healthy one if a switch fails over or a virtual machine moves.",
        ge=2,
    )
    progress_timeout_s: Seconds = setting(
        20.0,
        "a number of seconds, at least 1",
        "A worker is given up if its process is stopped or uses no CPU, and the worker has been at one "
        "instruction for longer than this time and longer than three steps. A shorter time finds a hang sooner, "
        "but costs a healthy worker if an instruction is slow now and then. If all workers wait for each other "
        "for twice as long, they regroup.",
        ge=1,
    )
    busy_timeout_s: Seconds = setting(
        120.0,
        "a number of seconds, at least 1",
        "The limit at one instruction for a worker whose process uses the CPU, as in a long micro-batch or an "
        "endless loop.",
        ge=1,
    )
    last_worker_timeout_s: Seconds = setting(
        300.0,
        "a number of seconds, at least 1",
        "The limit for whatever others await from a stage's last worker. With a `log` the stage is then "
        "replayed, else the job ends.",
        ge=1,
    )
    idle_timeout_s: Seconds = setting(
        600.0,
        "a number of seconds, more than 0",
        "The limit for work that may take long while others wait: the script's own code, data, a checkpoint, "
        "the first step, and an instruction for which a worker was given up before.",
        gt=0,
    )
    wait_timeout_s: Seconds = setting(
        900.0,
        "a number of seconds, more than 0",
        "The longest that a worker waits for anything; then the job ends. After a failure the survivors wait for"
        " each other until halfway between `idle_timeout_s` and this time.",
        gt=0,
    )
    costs: Folder | None = setting(
        None,
        f"{COSTS}, or null",
        "A JSON file with the costs of instructions, for the planner: the microseconds of each stage, as in "
        '{"forward": [900, 1200], "input": [900, 1200], "weight": [900, 1200]}, or a traced run\'s `costs.json`, '
        "which also has bytes. Null: the same for all.",
    )
    checkpoint: CheckpointSettings | None = setting(
        None,
        'an object such as {"overhead": 0.035}, or null',
        "Let the plugin make checkpoints: copied to host memory between two steps, and written in the "
        "background. Null: none.",
    )
    log: LogSettings | None = setting(
        None,
        'an object such as {"folder": null}, or null',
        "Log the data between stages on each sender's disk. If a stage's last worker is lost, its next "
        "process replays the stage from the last checkpoint while all others wait. Needs `checkpoint` and "
        "`rejoin`. Null: no log.",
    )
    metrics: Address | None = setting(
        None,
        'an address and a port such as "127.0.0.1:9400", or null',
        "Serve the job's numbers to Prometheus from the host of rank 0, at this address and port. Port 0 "
        "takes a free port, which the event `metrics` names. Anybody who reaches it may read, so use "
        "0.0.0.0 in trusted networks only. Null: no server.",
    )
    tls: Folder | None = setting(
        None,
        "a folder's path, or null",
        "Encrypt the connections between the job's processes, except Gloo's sums. The folder has on each "
        "host tls.crt (the host's certificate, followed by any between it and ca.crt), tls.key (its private "
        "key, not encrypted) and ca.crt (which has signed the certificates of all hosts), named as in a "
        "Kubernetes secret. The section has to be in the file that `--deepspeed_config` names on the "
        "command line; the environment's RECYCLE_TLS takes precedence. Null: no TLS.",
    )

    @property
    def deadlines(self) -> Deadlines:
        return Deadlines(**{one.name: getattr(self, one.name) for one in fields(Deadlines)})

    @property
    def exact_block(self) -> int | None:
        """The micro-batches of a block in exact mode; None: all of a replica's."""
        return None if isinstance(self.exact, bool) else self.exact

    @classmethod
    def from_section(cls, section: dict[str, Any] | None) -> Settings:
        """Return the settings of a DeepSpeed config's ``"recycle"`` section; None (no section) gives the defaults.
        Raises :class:`SettingsError` for an unknown key, a wrong type, a value out of range, or contradictory values.
        """
        if section is not None and not isinstance(section, dict):
            raise SettingsError("", f"{shown(section)} is {kind(section)}", 'write an object such as {"enabled": true}')
        try:
            settings = cls.model_validate(section or {})
        except ValidationError as error:
            raise SettingsError(*explained(error, cls, SECTIONS)) from None
        refuse_contradictions(settings)
        settings.given_costs()
        if settings.tls is not None:
            try:
                Tls(settings.tls)
            except NoCertificate as error:
                raise SettingsError("tls", error.wrong, error.fix) from None
        return settings

    def given_costs(self) -> StageCosts | None:
        """Return the contents of the file ``costs``. Raises :class:`SettingsError` if it can't be read."""
        if self.costs is None:
            return None
        try:
            return costs_file.read(self.costs)
        except OSError as error:
            raise SettingsError("costs", f"{self.costs}: {error.strerror}", f"write {COSTS}") from None
        except ValueError as error:
            raise SettingsError("costs", " ".join(str(error).split()), f"write {COSTS}") from None

    def in_fp16(self, clipping: float) -> Settings:
        """Return these settings for an fp16 job: losses are scaled, and steps that overflow are skipped. Overflows are
        rare, so without ``clipping`` (DeepSpeed's gradient_clipping) no step waits for its norm unless ``clip`` is set.
        """
        implied: dict[str, Any] = {"loss_scaling": True, "nonfinite": "skip"}
        if not clipping and self.stagger_optimizer and "clip" not in self.model_fields_set:
            implied["clip"] = "validate"
        found = self.model_copy(update=implied)
        refuse_shrinking(found)
        return found

    def for_replicas(self) -> Settings:
        """Return these settings for a job with `replicas`: a backward that the script calls is not split."""
        return self.model_copy(update={"split_backward": False})

    def waits_for_norm(self, clipping: float) -> bool:
        """Return whether a step waits for the norm over all stages; ``clipping``: DeepSpeed's gradient_clipping."""
        return self.clip == "sync" and (clipping > 0 or self.loss_scaling)

    def policy(self, validate: bool, stages: int) -> Policy:
        """Return the planner's policy. ``validate``: gradient clipping is on, so a step waits for its norm. Raises
        :class:`SettingsError` for an activation cap that does not fit the number of stages.
        """
        held = self.activation_cap
        if isinstance(held, tuple) and len(held) != stages:
            raise SettingsError(
                "activation_cap", f"{len(held)} entries for {stages} stages", f"write one number, or a list of {stages}"
            )
        return Policy(
            self.split_backward,
            self.stagger_optimizer,
            self.reroute,
            held,
            validate,
            block=self.exact_block if self.exact else 1,
            shrinks=self.batch == "shrink",
        )

    @property
    def fault_list(self) -> tuple[Fault, ...]:
        return tuple(map(Fault.parse, self.faults))

    def refuse_faults(self, shape: Topology) -> None:
        """Raise :class:`SettingsError` if a fault names a seat that ``shape`` does not have."""
        for fault in self.fault_list:
            if fault.seat not in shape.seats:
                raise SettingsError(
                    "faults",
                    f"'{fault}' names seat {fault.seat}, and the topology is {shape.replicas} replicas of "
                    f"{shape.stages} stages",
                    "write a seat as replica.stage, both from 0",
                )

    def fault_script(self, seat: Seat, incarnation: int = 0) -> FaultScript:
        return FaultScript(self.fault_list, seat, incarnation)

    def cost_model(self, shape: Topology) -> CostModel:
        """Return costs in microseconds for a job of ``shape``. Raises SettingsError for another number of stages."""
        if (found := self.given_costs()) is None:
            return CostModel.uniform(shape.stages, 1000, 1000, 1000)
        if (stages := found.costs.stages) != shape.stages:
            raise SettingsError(
                "costs",
                f"{self.costs} has costs of {stages} stages, and the job has {shape.stages}",
                f"write lists of {shape.stages}",
            )
        return found.costs


def reference() -> str:
    """Return all settings as a Markdown table: key, default, meaning."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    models: dict[str, type[BaseModel]] = {"": Settings, **SECTIONS}
    for section, model in models.items():
        for name, field in model.model_fields.items():
            rows.append(f"| `{section}{'.' * bool(section)}{name}` | `{shown(field.default)}` | {field.description} |")
    return "\n".join(rows)
