"""This machine as a place: one agent, apart from the command that submitted it."""

from __future__ import annotations

import os
import shlex
from typing import final

from weft.config.pool import Pool
from weft.run.places.contract import (
    FreeNodes,
    Gang,
    Job,
    PlacedJob,
    PlaceVerdict,
    Request,
    RequestLine,
    agent_command,
)
from weft.run.places.keeper import KeeperTask, KeptAgent, KeptPlace, start_keeper


@final
class LocalPlace(KeptPlace):
    """This machine."""

    name = "local"
    replaces_machines = True

    def request(self, gang: Gang, job: Job, pool: Pool) -> Request:
        words = agent_command(pool, job.run, ("--seat", "0/1", "--until-eof"))
        return Request(lines=(RequestLine(shlex.join(words), "the agent of this machine"),), command=())

    def check(self, request: Request, gang: Gang, job: Job, pool: Pool) -> PlaceVerdict:
        if gang.least > 1:
            text = f"this is one machine, and {gang.least} are wanted: --on ssh:FILE.toml has several"
            return PlaceVerdict(accepts=False, text=text)
        return PlaceVerdict(accepts=True, text="it starts at once")

    def submit(self, request: Request, gang: Gang, job: Job, pool: Pool) -> PlacedJob:
        command = tuple(shlex.split(request.lines[0].text))
        agents = (KeptAgent(name="this machine", command=command),)
        task = KeeperTask(
            agents=agents,
            num_wanted=1,
            grace_seconds=gang.grace_seconds,
            limit_seconds=gang.limit_seconds,
        )
        return start_keeper(job.run, task, self.name)

    def free(self, pool: Pool) -> list[FreeNodes]:
        return [FreeNodes(num_nodes=1, num_free=1, devices=f"{os.cpu_count() or 1} cores")]
