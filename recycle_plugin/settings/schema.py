"""The ``"recycle"`` section of the DeepSpeed JSON: strict, typed, frozen, checked at the door.

``Settings.from_section`` is the door.  What is wrong there becomes one line that names the key and
says what to write instead; the layers below see plain values, never a config object.  The schema is
stated here, and in ``sections`` for the settings that are objects, only: ``configs/recycle/default.yaml``
is compared with it by a test, and :func:`reference` prints it for the documentation.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from recycle_plugin.authentication.tls import NoCertificate, Tls
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.deadlines import Deadlines
from recycle_plugin.core.vocabulary.faults import Fault, FaultScript
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.profile import Profile, read_costs
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.settings import activation_cap as cap
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
    Rejoin,
    setting,
)
from recycle_plugin.settings.sections import (
    SECTIONS,
    CheckpointSettings,
    LogSettings,
)
from recycle_plugin.settings.wording import FAULT, SettingsError, explained, kind, shown

COSTS = "the path of a file that recycle profile --out wrote, or that has the costs of each stage"


class Settings(BaseModel):
    """All settings of the section, with their defaults."""

    model_config = STRICT

    enabled: bool = setting(False, BOOL, "switch the plugin on; false leaves the stock engine untouched")
    split_backward: bool = setting(True, BOOL, "run weight gradients apart from, and later than, input gradients")
    stagger_optimizer: bool = setting(
        True,
        BOOL,
        "let a stage step once it has its gradients, and start the next step; false: no stage steps before all have "
        "theirs",
    )
    reroute: bool = setting(True, BOOL, "give a lost worker's micro-batches to its data-parallel peers")
    activation_cap: Cap = setting(
        None,
        CAP,
        'micro-batches that one worker may hold at once: a number, a list of one for each stage, or "1f1b"; null for '
        "the number of "
        'stages; or, with a profile at `costs`, bytes: a size such as "12GiB", or "auto"',
    )
    norm: Norm = setting(
        True,
        'true or "deepspeed"',
        'gradient norm used for clipping: true over all stages, or "deepspeed" for what the stock engine computes',
    )
    clip: Literal["sync", "validate"] = setting(
        "sync",
        '"sync" or "validate"',
        "wait for the norm over all stages before each step, or step at once, "
        "and take the step back and clip it where the norm turns out to be over gradient_clipping; "
        'where it is left out, "validate" in fp16 without gradient_clipping',
    )
    nonfinite: Literal["end", "skip"] = setting(
        "end",
        '"end" or "skip"',
        "what a gradient norm that is not finite does, where it is computed (with gradient_clipping, or clip: "
        "validate): end the job, or skip the step",
    )
    loss_scaling: bool = setting(
        False,
        BOOL,
        "scale losses as the fp16 section says, dynamically by default, and skip steps that overflow, in fp32; "
        "with `fp16.enabled` this is so, and `nonfinite` is skip, whatever is written",
    )
    undo: Literal["snapshot", "host_snapshot", "inverse"] = setting(
        "snapshot",
        '"snapshot", "host_snapshot" or "inverse"',
        "what takes an uncommitted step back: an exact copy of what the step changes, made before each step; the same "
        "in host memory, made while an accelerator computes; or the optimizer's rule turned round; where a script runs "
        "forward and backward itself nothing is kept, since no step of a whole model is taken back, but with `clip` "
        "validate",
    )
    exact: Count | bool = setting(
        False,
        "true, false, or a whole number of at least 1",
        "the same bits whoever fails: parameters, optimizer state and losses are those of the exact run without a "
        "failure. Gradients are added block by block. A block is so many consecutive micro-batches of a replica as the "
        "number says (true: all of them), and stays on one worker: small blocks can be rerouted more freely, and each "
        "block of a worker beyond its first takes one more buffer of the gradients' size",
    )
    unit: Literal["worker", "replica"] = setting(
        "worker",
        '"worker" or "replica"',
        "who is given up as one when a worker is lost, and comes back as one: the worker, whose work its data-parallel "
        "peers take; or its whole replica, which takes part again once all its workers can",
    )
    replicas: Count | None = setting(
        None,
        "a whole number of at least 1, or null",
        'for jobs without a pipeline, with `unit` "replica": how many replicas the job\'s ranks make, at least 2; each '
        "has as many neighbouring ranks, and DeepSpeed shards inside of it by ZeRO",
    )
    batch: Literal["constant", "shrink"] = setting(
        "constant",
        '"constant" or "shrink"',
        "what becomes of the micro-batches of a replica that is out, with `unit: replica`: the other replicas compute "
        "them, so that the global batch stays; or nobody does, sums are divided by what was contributed, and each such "
        "step is applied with sqrt(live / all) of its learning rate; no stage then steps before all have their "
        "gradients",
    )
    zero: Literal["replicate"] | None = setting(
        None,
        '"replicate" or null',
        "what becomes of `zero_optimization.stage` 1, whose shards of the optimizer's state have no copy: "
        "every worker keeps all of it, with Adam 12 bytes a parameter instead of 12 / replicas, and steps all of it; "
        "null: it is refused",
    )
    keep_bytes: Bytes = setting(
        None,
        'a whole number of at least 1, a size such as "2GiB", or null',
        "what one worker may keep in host memory, until a step is committed, of what it has sent to peers: "
        "a number of bytes or a size; null for all of it; what is not there any more after a failure is run again; "
        "the event `peak` says how much it was",
    )
    pinned_bytes: Bytes = setting(
        "4GiB",
        'a whole number of at least 1, a size such as "2GiB", or null',
        "on accelerators: how much host memory one worker may pin, for copies that go on beside the computing; "
        "null for as much as there is; past it copies keep the worker waiting",
    )
    rng: Literal["keyed", "stream"] = setting(
        "keyed",
        '"keyed" or "stream"',
        "dropout keyed by step, replica, micro-batch and stage, or drawn from the worker's own stream as stock does",
    )
    seed: int = setting(1234, "a whole number, not negative", "root of all keyed random numbers", ge=0)
    rebalance: bool = setting(
        False,
        BOOL,
        "deal a stage's work out anew where a worker has been 30% slower than the others for three steps, and again "
        "when it is not",
    )
    rejoin: Rejoin = setting(
        "always",
        'a whole number, not negative, "always" or "never"',
        "whether the process of a lost worker is started again, to come back: always, until 5 in a row have died "
        "before they were admitted; a number of starts in a row; or never; "
        "who is started by `--join` takes a lost seat whatever this is",
    )
    checkpoint_dir: Folder | None = setting(
        None,
        "a folder's path, or null",
        "where the checkpoints go that the script does not save itself, a folder that all hosts share: those of "
        "`checkpoint` (null: in the run folder) and the last one of a job that is ended from outside (null: where the "
        "script's last one went)",
    )
    resume_iterators: bool = setting(
        False,
        BOOL,
        "after `load_checkpoint` read each replica's plain iterator up to where it stood when the checkpoint was "
        "saved; false for scripts that skip by themselves, or begin anew",
    )
    transfer_interface: str | None = setting(
        None,
        "the name of a network interface, an address of the host, or null",
        "where a worker that comes back gets its stage's state from this one: an interface or an address of each host; "
        "null for the one that reaches the coordinator",
        min_length=1,
    )
    group_sums: Literal["warn", "scale", "raise"] = setting(
        "warn",
        '"warn", "scale" or "raise"',
        "what a sum of the script's own over a process group with lost members does, whose size stays as it was: "
        '"warn" says once for each calling line that it is without their part; "scale" multiplies each SUM by all / '
        "live members, whole numbers rounded to the nearest, halves up, for counts and losses that the script divides "
        'by the world size or multiplies with it; "raise" ends the job; '
        "an average over the live is `recycle_plugin.mean(tensor, group)`",
    )
    check_replicas: int = setting(
        0,
        "a whole number, not negative",
        "every so many steps the replicas of a stage compare hashes of all that a step changes (parameters, optimizer "
        "state, learning rate, counts); "
        "0: only after a checkpoint is loaded",
        ge=0,
    )
    placement: Literal["deepspeed", "strict", "spread"] = setting(
        "deepspeed",
        '"deepspeed", "strict" or "spread"',
        'which host has which ranks. "deepspeed": as its launcher gives them out, with a warning if one host holds '
        'every replica of a stage. "strict": the same, and such a job is refused. "spread": dealt out so that no host '
        "does; the section then has to be in the file that `--deepspeed_config` names on the command line",
    )
    run_dir: Folder | None = setting(
        None,
        "a folder's path, or null",
        "where events, traces and reports go, of one job at a time; null lets the plugin choose",
    )
    secret_file: Folder | None = setting(
        None,
        "a file's path, or null",
        "where the job's secret is, by which its processes know each other: a file in a folder that all hosts share, "
        "of mode 0600, which rank 0's host makes where it is not there, and removes at the end; "
        "null for a folder of this user's own on one host, and for `secret` in `run_dir` on several; "
        "for which the section has to be in the file that `--deepspeed_config` names on the command line; "
        "the environment's RECYCLE_SECRET_FILE goes before it",
    )
    report: bool = setting(True, BOOL, "write `report.html` to the run folder when the job ends")
    trace: bool = setting(False, BOOL, "write every executed instruction with its times to the run folder")
    faults: Faults = setting(
        (), f"a list of faults such as [{FAULT}]", "faults to inject, each at a named instruction or point"
    )
    heartbeat_timeout_s: float = setting(
        15.0,
        "a number of seconds, at least 2",
        "a host that is gone or cut off without a word is found within this time, and its workers are given up; "
        "less finds it sooner, and costs a healthy host where a switch fails over or a virtual machine moves",
        ge=2,
        allow_inf_nan=False,
    )
    progress_timeout_s: float = setting(
        20.0,
        "a number of seconds, at least 1",
        "a worker that is at one instruction for longer than this, and than three steps take, "
        "and whose process uses no CPU or is stopped, is given up as if it had died; less finds it sooner, "
        "and costs a healthy worker where an instruction is slow now and then; "
        "where all wait for each other for twice as long, all meet again",
        ge=1,
        allow_inf_nan=False,
    )
    busy_timeout_s: float = setting(
        120.0,
        "a number of seconds, at least 1",
        "the same for a worker whose process uses the CPU, as long micro-batches do, and endless loops",
        ge=1,
        allow_inf_nan=False,
    )
    last_worker_timeout_s: float = setting(
        300.0,
        "a number of seconds, at least 1",
        "a stage's last worker is not given up for any of these: where it is silent, stopped or stuck for this long, "
        "its stage is replayed if there is a `log`, else the job ends",
        ge=1,
        allow_inf_nan=False,
    )
    regroup_timeout_s: float = setting(
        120.0,
        "a number of seconds, more than 0",
        "longest wait for the survivors to agree after a failure, and of a worker for the coordinator; then the job "
        "ends",
        gt=0,
        allow_inf_nan=False,
    )
    idle_timeout_s: float = setting(
        600.0,
        "a number of seconds, more than 0",
        "the same as `progress_timeout_s` for what may take long, while others wait for it: the script's own code, "
        "data, a checkpoint, the first step, and an instruction for which a worker has been given up already",
        gt=0,
        allow_inf_nan=False,
    )
    wait_timeout_s: float = setting(
        900.0,
        "a number of seconds, more than 0",
        "longest wait of a worker for anything; then the job ends",
        gt=0,
        allow_inf_nan=False,
    )
    costs: Folder | None = setting(
        None,
        f"{COSTS}, or null",
        "what instructions cost, for the planner: a file of `recycle profile --out`, which also knows bytes; or one "
        'with microseconds, of each stage: {"forward": [900, 1200], "input": [900, 1200], "weight": [900, 1200]}; null '
        "for the same on all stages",
    )
    checkpoint: CheckpointSettings | None = setting(
        None,
        'an object such as {"overhead": 0.035}, or null',
        "checkpoints that are made by themselves: copied to host memory between two steps, and written in the "
        "background; null for none",
    )
    log: LogSettings | None = setting(
        None,
        'an object such as {"folder": null}, or null',
        "what crosses stages is logged on each sender's disk: where a stage's last worker is lost, the next process "
        "replays it from the last checkpoint while all others wait; needs `checkpoint` and `rejoin`; null for no log",
    )
    metrics: Address | None = setting(
        None,
        'an address and a port such as "127.0.0.1:9400", or null',
        "serve the job's numbers to Prometheus from the host of rank 0, at this address and port; port 0: one that is "
        "free, which the event `metrics` says. Nobody has to say who they are, so 0.0.0.0, which others can reach, "
        "is for networks that are trusted; null: no server",
    )
    tls: Folder | None = setting(
        None,
        "a folder's path, or null",
        "encrypt what the job's processes say to each other, but for Gloo's sums. The folder has on each host tls.crt "
        "(the host's certificate, and behind it those between it and ca.crt, if there are any), tls.key (its private "
        "key, not encrypted) and ca.crt, which has signed those of all hosts: the names of a Kubernetes secret. The "
        "section has to be in the file that `--deepspeed_config` names on the command line; the environment's "
        "RECYCLE_TLS goes before it; null for no TLS",
    )

    @property
    def deadlines(self) -> Deadlines:
        """The settings that are deadlines, in seconds."""
        return Deadlines(**{one.name: getattr(self, one.name) for one in fields(Deadlines)})

    @property
    def exact_block(self) -> int | None:
        """The micro-batches of a block in exact mode; None: all of a replica's."""
        return None if isinstance(self.exact, bool) else self.exact

    @classmethod
    def from_section(cls, section: dict[str, Any] | None) -> Settings:
        """The settings of a DeepSpeed config's ``"recycle"`` section; None (no section) gives the defaults.

        Raises :class:`SettingsError`: unknown key, wrong type, value out of range, contradictory values.
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

    def given_costs(self) -> Profile | CostModel | None:
        """What ``costs`` names.  Raises :class:`SettingsError` where that can't be read."""
        if self.costs is None:
            return None
        try:
            return read_costs(self.costs)
        except OSError as error:
            raise SettingsError("costs", f"{self.costs}: {error.strerror}", f"write {COSTS}") from None
        except ValueError as error:
            raise SettingsError("costs", " ".join(str(error).split()), f"write {COSTS}") from None

    def profile(self) -> Profile | None:
        """The profile that ``costs`` names, if it names one.  Raises as :meth:`given_costs` does."""
        return found if isinstance(found := self.given_costs(), Profile) else None

    def in_fp16(self, clipping: float) -> Settings:
        """These settings, as they are in an fp16 job: losses are scaled, and steps that overflow skipped.

        These are few, so that without ``clipping``, DeepSpeed's gradient_clipping, no step waits for its norm, unless
        ``clip`` says so.
        """
        implied: dict[str, Any] = {"loss_scaling": True, "nonfinite": "skip"}
        if not clipping and self.stagger_optimizer and "clip" not in self.model_fields_set:
            implied["clip"] = "validate"
        found = self.model_copy(update=implied)
        refuse_shrinking(found)
        return found

    def for_replicas(self) -> Settings:
        """These settings, as they are with `replicas`: a backward that the script calls is not split."""
        return self.model_copy(update={"split_backward": False})

    def waits_for_norm(self, clipping: float) -> bool:
        """Whether no step is applied before the norm over all stages is known; ``clipping``: DeepSpeed's
        gradient_clipping.
        """
        return self.clip == "sync" and (clipping > 0 or self.loss_scaling)

    def policy(self, validate: bool, stages: int) -> Policy:
        """The planner's policy.  ``validate``: gradient clipping is on, so that a step waits for its norm.

        Raises :class:`SettingsError` for an activation cap that doesn't go with the profile or the number of stages.
        """
        held, room = self.activation_cap, None
        if isinstance(held, tuple) and len(held) != stages:
            raise SettingsError(
                "activation_cap", f"{len(held)} entries for {stages} stages", f"write one number, or a list of {stages}"
            )
        if cap.in_bytes(held):
            try:
                room, held = cap.memory_bytes(held, self.profile(), stages, self.undo), None
            except ValueError as error:
                raise SettingsError(
                    "activation_cap", f'"auto" is not possible: {error}', "write a number of micro-batches"
                ) from None
        return Policy(
            self.split_backward,
            self.stagger_optimizer,
            self.reroute,
            held,
            validate,
            room,
            block=self.exact_block if self.exact else 1,
            shrinks=self.batch == "shrink",
        )

    @property
    def fault_list(self) -> tuple[Fault, ...]:
        """The faults to inject, parsed."""
        return tuple(map(Fault.parse, self.faults))

    def refuse_faults(self, shape: Topology) -> None:
        """Raise :class:`SettingsError` if a fault is to strike a seat that ``shape`` has not."""
        for fault in self.fault_list:
            if fault.seat not in shape.seats:
                raise SettingsError(
                    "faults",
                    f"'{fault}' names seat {fault.seat}, and the topology is {shape.replicas} replicas of "
                    f"{shape.stages} stages",
                    "write a seat as replica.stage, both from 0",
                )

    def fault_script(self, seat: Seat, incarnation: int = 0) -> FaultScript:
        """The faults that strike the ``incarnation``-th process at ``seat``."""
        return FaultScript(self.fault_list, seat, incarnation)

    def cost_model(self, shape: Topology, samples: int) -> CostModel:
        """Costs in microseconds for a job of ``shape`` with micro-batches of ``samples``.

        Raises :class:`SettingsError` for costs of another number of stages, and for a profile of another job.
        """
        found = self.given_costs()
        if isinstance(found, Profile):
            return self._profiled(found, shape, samples)
        if found is not None and found.stages != shape.stages:
            raise SettingsError(
                "costs",
                f"{self.costs} has costs of {found.stages} stages, and the job has {shape.stages}",
                f"write lists of {shape.stages}",
            )
        return found or CostModel.uniform(shape.stages, 1000, 1000, 1000)

    def _profiled(self, found: Profile, shape: Topology, samples: int) -> CostModel:
        if found.micro_batch != samples:
            raise SettingsError(
                "costs",
                f"measured with micro-batches of {found.micro_batch}, and the job's have {samples}",
                f"measure again with recycle profile --micro-batch {samples}",
            )
        try:
            return found.costs(shape.stages, shape.replicas, fused=not self.split_backward)
        except ValueError as error:
            raise SettingsError("costs", str(error), "name the profile of this job's model") from None


def reference() -> str:
    """All settings as a Markdown table: key, default, meaning."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    models: dict[str, type[BaseModel]] = {"": Settings, **SECTIONS}
    for section, model in models.items():
        for name, field in model.model_fields.items():
            rows.append(f"| `{section}{'.' * bool(section)}{name}` | `{shown(field.default)}` | {field.description} |")
    return "\n".join(rows)
