"""A launcher for one host: it runs all supervisors in one process and forks workers from a warm one. The launcher
starts and ends the warm process too. If the launcher ends, all other processes end. It imports no torch and no
DeepSpeed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

from recycle_plugin.errors import NoCredentials
from recycle_plugin.runtime.processes import signal_senders as senders
from recycle_plugin.runtime.processes.descriptors import TooFewDescriptors, provide
from recycle_plugin.runtime.processes.hosted import BadMaster, Hosted
from recycle_plugin.runtime.processes.signal_copies import Copies, Witness
from recycle_plugin.runtime.processes.spawn import NoServer, ServerProcess
from recycle_plugin.runtime.processes.supervisor import Supervisor
from recycle_plugin.runtime.processes.variables import SERVER_VARIABLE
from recycle_plugin.runtime.processes.worker_keeper import Here
from recycle_plugin.runtime.system.console import say

HERE = "127.0.0.1"
PIECE = 1 << 10
END_S = 30.0  # how long a job may take to end when told, as under DeepSpeed's launcher


class Launcher:
    """Runs a job on this host: ``command``, the training script with its arguments, ``workers`` times.

    ``placement``: as in the script's config. ``imports``: the modules that a fork server imports for workers; None to
    start workers as children that import everything themselves. A fork server that the environment names is used
    instead, and not ended. ``one_device``: each worker is told that it is the first of its host, and so uses the first
    accelerator.
    """

    def __init__(
        self,
        command: list[str],
        workers: int,
        port: int,
        placement: str,
        environment: Mapping[str, str],
        imports: list[str] | None,
        one_device: bool = False,
    ) -> None:
        self._command = command
        self._workers = workers
        self._port = port
        self._placement = placement
        self._imports = imports
        self._one_device = one_device
        self._environment = dict(environment) | {
            "MASTER_ADDR": HERE,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(workers),
            "LOCAL_SIZE": str(workers),
            "CROSS_RANK": "0",
            "CROSS_SIZE": "1",
        }
        self._hosted: Hosted | None = None
        self._told = False  # to end
        self._supervisors: list[Supervisor] = []
        self._copies = Copies(self._pass_on)  # of signals to this process, and to the witness

    async def run(self, witness: Witness) -> int:
        """Run the job. Return the exit code: 0 if it has come to its end, even if workers have died on the way; 1 if it
        was told to end; else the largest of its supervisors' and the job's. Raises TooFewDescriptors, BadMaster.
        """
        provide(self._workers)
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in one"
        self._running = task
        senders.take(self._signalled, self._passed)
        asyncio.get_running_loop().add_reader(witness.comes, self._seen, witness)
        if self._imports is None:
            self._environment.pop(SERVER_VARIABLE, None)
        server = await self._server()
        if server is None:
            return await self._train()
        try:
            self._environment[SERVER_VARIABLE] = server.address
            return await self._train()
        finally:
            if died := await server.stop():
                say(f"error: the process that all workers were forked from {died}, and they with it")

    async def _server(self) -> ServerProcess | None:
        if self._imports is None or SERVER_VARIABLE in self._environment:
            return None
        try:
            return await ServerProcess.start(self._imports)
        except NoServer as error:
            say(f"warning: workers are not forked, and each imports everything itself: {error}")
            return None

    async def _train(self) -> int:
        self._hosted = await Hosted.start((HERE, self._port), self._workers, self._environment)
        self._supervisors = [self._supervisor(rank) for rank in range(self._workers)]
        running = [asyncio.create_task(each.run()) for each in self._supervisors]
        given_up = True
        try:
            codes = await asyncio.gather(*running)
            given_up = False
        finally:
            for each in running:
                each.cancel()
            await asyncio.wait(running)
            await self._hosted.close(at_once=given_up)
        return 1 if self._told else max(*codes, self._hosted.coordinator.code)

    def _supervisor(self, rank: int) -> Supervisor:
        described = self._environment | {"RANK": str(rank), "LOCAL_RANK": "0" if self._one_device else str(rank)}
        return Supervisor(self._command, described, self._placement, Here(), self._hosted)

    def _seen(self, witness: Witness) -> None:
        for number in os.read(witness.comes, PIECE):
            self._passed(number, to_other=True)

    def _passed(self, number: int, to_other: bool = False) -> None:
        self._copies.came(number, to_other)
        if (wait_s := self._copies.wait_s) is not None:
            asyncio.get_running_loop().call_later(wait_s, self._copies.settle)

    def _pass_on(self, number: int) -> None:
        for each in self._supervisors:
            each.pass_on(number)

    def _signalled(self, what: str) -> None:
        """End the job at a commit. End it at once at the second signal, if there is no job yet, or after END_S."""
        if self._told or self._hosted is None:
            self._running.cancel()
        else:
            self._told = True
            self._hosted.coordinator.terminate(f"the launcher got {what}")
            asyncio.get_running_loop().call_later(END_S, self._running.cancel)


def main(launcher: Launcher) -> int:
    """Run the launcher's job in an event loop and return the exit code. Prints what could not be started."""
    witness: Witness | None = None
    try:
        witness = Witness()
        return asyncio.run(launcher.run(witness))
    except (BadMaster, OSError, NoCredentials, TooFewDescriptors) as error:
        say(f"error: {error}")
        return 1
    except asyncio.CancelledError:
        return 1
    finally:
        if witness is not None:
            witness.close()
