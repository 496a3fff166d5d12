"""All that Weft asks of Ray's Python package, which only the driver of a job needs."""

from __future__ import annotations

import importlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, final

from weft.errors import LaunchError
from weft.run.places.ray_nodes import RayNode

_NODE_LABEL = "ray.io/node-id"
_TOLD_SECONDS = 10.0


@final
class RayCluster:
    """The cluster to which this process belongs as a driver."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._agent_class = _agent_class(ray)
        self._groups = importlib.import_module("ray.util.placement_group")
        self._strategies = importlib.import_module("ray.util.scheduling_strategies")
        self._state = importlib.import_module("ray._private.state")

    @classmethod
    def connect(cls) -> Self:
        """Join the cluster that has started this process.

        Raises:
            LaunchError: this Python has no Ray, or no cluster has started it.
        """
        try:
            ray = importlib.import_module("ray")
        except ImportError:
            raise LaunchError(
                "this Python has no package ray, and the job's driver needs it. Install Weft into the Python of the"
                " cluster, and name it as command in the pool."
            ) from None
        try:
            ray.init(address="auto", logging_level=logging.WARNING)
        except ConnectionError:
            raise LaunchError("no Ray runs here. weft agent --ray is what Ray starts: see weft train --on.") from None
        return cls(ray)

    def nodes(self) -> list[RayNode]:
        """The living nodes."""
        # Ray's public calls tell what is free on all nodes together, and the dashboard's are five seconds old.
        free: Mapping[str, Mapping[str, float]] = self._state.available_resources_per_node()
        return [
            RayNode(
                number=each["NodeID"],
                address=each["NodeManagerAddress"],
                total=each["Resources"],
                free=free.get(each["NodeID"], {}),
                labels=each["Labels"],
            )
            for each in self._ray.nodes()
            if each["Alive"]
        ]

    def ask(
        self, bundle: Mapping[str, float], count: int, selectors: Sequence[Mapping[str, str]], name: str
    ) -> RayGroup:
        """Ask for so many bundles on as many nodes, all or none.

        Args:
            name: of the group, for people; a drawn part is added.
            selectors: labels of the node for each bundle; empty: any nodes.
        """
        bundles = [dict(bundle)] * count
        labelled = [dict(each) for each in selectors] or None
        # Ray frees the name of a group a while after it was given back, and refuses another group of it till then.
        own_name = f"{name}-{secrets.token_hex(3)}"
        group = self._groups.placement_group(
            bundles, strategy="STRICT_SPREAD", name=own_name, bundle_label_selector=labelled
        )
        return RayGroup(self._groups, group, dict(bundle), count)

    def ask_for_another(self, bundle: Mapping[str, float], beside: Sequence[str], name: str) -> RayGroup:
        """Ask for a bundle on a node that is none of some."""
        return self.ask(bundle, 1, [{_NODE_LABEL: f"!in({','.join(beside)})"}] if beside else [], name)

    def begin(self, group: RayGroup, position: int) -> RayAgent:
        """Have an actor made in a bundle, which waits where Ray looks for a node."""
        strategy = self._strategies.PlacementGroupSchedulingStrategy(group.group, position)
        actor = self._agent_class.options(
            num_cpus=group.bundle.get("CPU", 0), num_gpus=group.bundle.get("GPU", 0), scheduling_strategy=strategy
        ).remote()
        return RayAgent(self._ray, actor, actor.node.remote())

    def leave(self) -> None:
        """Leave the cluster: what this driver holds there is free."""
        self._ray.shutdown()


@dataclass(frozen=True, slots=True)
class RayGroup:
    """Bundles that were asked for together."""

    _groups: Any
    group: Any
    """Ray's own object."""
    bundle: Mapping[str, float]
    count: int

    def wait(self, seconds: float) -> bool:
        """Wait so long; return whether all bundles have their nodes."""
        return bool(self.group.wait(seconds))

    def give_back(self) -> None:
        """Let others have the nodes, or ask for them no longer."""
        self._groups.remove_placement_group(self.group)


@final
class RayAgent:
    """An actor in one bundle, and the agent that it runs."""

    def __init__(self, ray: Any, actor: Any, asked: Any) -> None:
        self._ray, self._actor, self._asked = ray, actor, asked

    def answer(self) -> str | int | Literal["lost"] | None:
        """What was asked last has been answered: the node, or, behind `run`, the agent's status.  None: not yet;
        `lost`: the node is gone, or the actor."""
        ready, _ = self._ray.wait([self._asked], timeout=0)
        if not ready:
            return None
        try:
            return self._ray.get(self._asked)
        except self._ray.exceptions.RayError:
            self.end()  # one that is only out of reach would hold the bundle
            return "lost"

    def run(self, command: Sequence[str]) -> None:
        """Have it run a command; `answer` then is that one's status."""
        self._asked = self._actor.run.remote(list(command))

    def tell_to_leave(self) -> None:
        """Close the standard input of what it runs."""
        self._actor.leave.remote()

    def end(self) -> None:
        """End the actor.  What it runs sees the end of its standard input."""
        self._ray.kill(self._actor)


def _agent_class(ray: Any) -> Any:
    """The class of actors.  It is defined here, so that Ray carries it over whole: workers of nodes need no Weft."""

    class WeftAgent:
        """Runs one command, whose standard input is open as long as it is to run."""

        def __init__(self) -> None:
            self.process: Any = None
            self.is_to_leave = False

        def node(self) -> str:
            return ray.get_runtime_context().get_node_id()

        def run(self, command: list[str]) -> int:
            import subprocess
            import sys

            try:
                # Ray ends the process group of a worker; an agent is to save first, at the end of its input.
                self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            except OSError as error:
                print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
                return 127
            if self.is_to_leave:
                self.process.stdin.close()
            return self.process.wait()

        def leave(self) -> None:
            self.is_to_leave = True
            if self.process is not None and not self.process.stdin.closed:
                self.process.stdin.close()

    # One thread runs the command, and another is told to leave.
    return ray.remote(max_concurrency=2, max_restarts=0)(WeftAgent)
