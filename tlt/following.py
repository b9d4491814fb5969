"""A worker whose engine is one rank of another worker's: it trains as every worker does, and follows in rollouts.

Always holds: it has no requests, no drafter and no shape policy; in a rollout it runs its slice of the policy whenever
the leader runs its own. Between rollouts it is a worker like any other. Does not know how calls reach it.
"""

from dataclasses import replace

from tlt.engine.engine import SleepReport
from tlt.engine.follower import Follower
from tlt.fleet import Peers, Worker
from tlt.loop import Emit


class FollowingWorker(Worker):
    def _open_engine(self, peers: Peers, emit: Emit) -> None:
        """The leader opens its engine meanwhile, and measures it."""
        self._parallel = peers.parallel
        self.drafter, self.tuner, self._keeper = None, None, None
        self._version = 0
        self._plain_follower: Follower | None = None
        spec, settings = self.config.spec, self._with_room().engine
        nodes = max(spec.verifies) if spec.drafters or spec.ahead != "off" else 1
        self._follower = Follower(self._part, peers.parallel, settings, nodes)
        self._follower.follow()

    def follow(self) -> None:
        """Runs what the leader runs, until it lets go."""
        (self._plain_follower or self._follower).follow()

    def begin_replay(self) -> None:
        settings = replace(self._with_room(taken=True).engine, sleep="never")
        self._plain_follower = Follower(self._part, self._parallel, settings)
        self._plain_follower.follow()

    def end_replay(self) -> None:
        self._plain_follower = None

    def begin_evaluation(self) -> None:
        pass

    def end_evaluation(self) -> None:
        pass

    def _sleep(self) -> None:
        self._follower.sleep()

    def _load_policy(self, version: int) -> None:
        self._follower.wake()
        self._version = version

    @property
    def version(self) -> int:
        return self._version

    @property
    def slept(self) -> SleepReport | None:
        """The leader's report stands for all ranks."""
        return None
