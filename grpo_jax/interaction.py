"""Keeping the tools in use: the interaction bonus, its controller, the call-rate floor.

Stage 8 of a step. The statistic is `interaction/call_rate`, the share of trajectories
with an executed call among those whose task needs a tool. No paper defines the floor;
it is this project's own. After every rollout batch

    mu <- clip(mu + eta (floor - rate), 0, limit)

a Lagrange multiplier of the constraint rate >= floor. What happens below the floor:

* "bonus" (default): mu joins the interaction weight, the bonus that a trajectory of
  such a task earns for an executed call. It rises while the rate is below the floor and
  falls back to `reward.interaction` above it.
* "kl": that batch is learned with `floor_kl` more KL to the reference. This helps only
  where the reference calls its tools.
* "reject": that batch is not learned from. A policy without any call stays so.

The multiplier is kept with every checkpoint.
"""

import dataclasses
from collections.abc import Mapping

RATE = "interaction/call_rate"


@dataclasses.dataclass
class Controller:
    """The interaction weight of a run and the floor's multiplier.

    Attributes:
      interaction: the weight that is always there.
      floor: least call rate on tasks that need a tool, 0 to 1; 0: none.
      rate: eta, change of the multiplier for a shortfall of 1.
      limit: the largest interaction weight.
      mode: "bonus", "kl" or "reject".
      multiplier: mu.
    """

    interaction: float = 0.0
    floor: float = 0.0
    rate: float = 0.1
    limit: float = 0.5
    mode: str = "bonus"
    multiplier: float = 0.0

    @property
    def active(self) -> bool:
        """There is a bonus, or may be one."""
        return self.interaction > 0 or (self.floor > 0 and self.mode == "bonus")

    @property
    def weight(self) -> float:
        """The bonus for an executed call on a task that needs a tool."""
        return self.interaction + self.multiplier

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        """The weight that a rollout batch with these metrics was rewarded with, and
        whether it is below the floor."""
        found = {"interaction/weight": self.weight} if self.active else {}
        if self.floor and RATE in values:
            found["interaction/below_floor"] = float(values[RATE] < self.floor)
        return found

    def take(self, values: Mapping[str, float]) -> bool:
        """Move on by a rollout batch's metrics; True if it is below the floor.

        A batch without a task that needs a tool changes nothing.
        """
        if not self.floor or RATE not in values:
            return False
        if self.mode == "bonus":
            wanted = self.multiplier + self.rate * (self.floor - values[RATE])
            self.multiplier = min(max(wanted, 0.0), self.limit - self.interaction)
        return values[RATE] < self.floor

    def state(self) -> dict[str, float]:
        """What a resumed run needs, as JSON values."""
        return {"multiplier": self.multiplier}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from `state` ({}: the start), within the limits that hold now."""
        most = max(self.limit - self.interaction, 0.0)
        self.multiplier = min(state.get("multiplier", 0.0), most)
