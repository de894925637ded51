"""A plan on its way from one process to another."""

from placement.plan import Plan, Policy, Refusal, UnitPlan, WorkerPlan
from placement.plan_codec import plan_from_json, plan_to_json


def test_a_plan_comes_back_as_it_was() -> None:
    workers = tuple(WorkerPlan(index, "node0+1", (0, 2), 1, 1 << 40, (0,)) for index in range(3))
    unit = UnitPlan("node0+1", (0, 1), (0, 1), (0, 1, 2, 3), 5, workers)
    plan = Plan(Policy.INTERLEAVE, "why", (unit,), (Refusal("--workers", "too many"),), ("a note",))
    assert plan_from_json(plan_to_json(plan)) == plan
