"""A plan as JSON, for the way from one process to another."""

from __future__ import annotations

import json
from dataclasses import asdict

from placement.plan import Plan, Policy, Refusal, UnitPlan, WorkerPlan


def plan_to_json(plan: Plan) -> str:
    """Everything in it."""
    return json.dumps({**asdict(plan), "policy": plan.policy.value})


def plan_from_json(text: str) -> Plan:
    """Inverse of `plan_to_json`; raises ValueError, KeyError or TypeError for anything else."""
    fields = json.loads(text)
    return Plan(
        policy=Policy(fields["policy"]),
        policy_reason=fields["policy_reason"],
        units=tuple(_unit(unit) for unit in fields["units"]),
        refusals=tuple(Refusal(**refusal) for refusal in fields["refusals"]),
        notes=tuple(fields["notes"]),
    )


def _unit(fields: dict) -> UnitPlan:
    workers = tuple(WorkerPlan(**_tuples(worker)) for worker in fields.pop("workers"))
    return UnitPlan(workers=workers, **_tuples(fields))


def _tuples(fields: dict) -> dict:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
