"""The plan of the next generation: what a fresh start would do, checked against what runs meanwhile."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import service.replan
from placement.orders import Planned, PlanOrder, PlanRefused
from placement.plan import PlanRequest
from placement.plan_codec import plan_from_json
from placement.topology import Topology, read_topology
from service.config import ServiceConfig
from service.replan import plan_beside, replan, request_to_json

GIB = 1 << 30
REQUEST = PlanRequest(weights_bytes=4 * GIB, kv_block_bytes=1 << 20, min_kv_blocks=64, workers=2)


def host(available: int) -> Topology:
    """One node with so much memory available, whatever this host has."""
    topology = read_topology()
    node = replace(topology.nodes[0], memory_total=32 * GIB, memory_available=available)
    return replace(topology, nodes=(node,), memory_limits=())


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch):
    def set_to(size: int) -> None:
        monkeypatch.setattr(service.replan, "read_topology", lambda: host(size))

    return set_to


def test_new_weights_that_fit_alone_but_not_beside_the_old_are_refused(available) -> None:
    available(4 * GIB)
    plan = plan_beside(REQUEST, Counter(), Counter({0: 10 * GIB}))
    (refusal,) = plan.refusals
    assert "memory of node 0, beside what runs" in refusal.subject
    available(7 * GIB)
    assert plan_beside(REQUEST, Counter(), Counter({0: 10 * GIB})).refusals == ()


def test_caches_are_as_large_as_a_fresh_start_would_make_them(available) -> None:
    available(20 * GIB)
    fresh = plan_beside(REQUEST, Counter(), Counter())
    available(12 * GIB)
    again = plan_beside(REQUEST, Counter(), Counter({0: 8 * GIB}))
    assert again.units == fresh.units


def test_segments_that_stay_need_no_memory_anew(available) -> None:
    available(3 * GIB)
    assert plan_beside(REQUEST, Counter(), Counter()).refusals
    assert plan_beside(REQUEST, Counter({0: 4 * GIB}), Counter()).refusals == ()


def test_no_host_is_large_enough_for_some_models(available) -> None:
    available(4 * GIB)
    (refusal,) = plan_beside(replace(REQUEST, weights_bytes=64 * GIB), Counter(), Counter()).refusals
    assert refusal.subject == "memory of node 0"


def order(model: Path, **fields: object) -> PlanOrder:
    config = ServiceConfig(str(model), "m", "127.0.0.1", 1, "/run", asked_model=str(model))
    request = PlanRequest(1, 1, 1, workers=1, kv_cache_bytes=16 << 20)
    return PlanOrder("", request_to_json(request), config.to_json(), **fields)  # type: ignore[arg-type]


def test_a_reload_follows_the_link_it_was_given(tiny_model: Path, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(tiny_model)
    planned = replan(order(link), [])
    assert isinstance(planned, Planned)
    assert planned.model_dir == str(tiny_model)
    config = ServiceConfig.from_json(planned.service_config)
    assert (config.model_dir, config.asked_model) == (str(tiny_model), str(link))
    assert json.loads(planned.model_files).keys() == {"model.safetensors"}
    (unit,) = plan_from_json(planned.plan).units
    assert len(unit.workers) == 1


def test_another_number_of_workers_replaces_the_flag(tiny_model: Path) -> None:
    planned = replan(order(tiny_model, workers=3, policy="replicate"), [])
    assert isinstance(planned, Planned)
    assert sum(len(unit.workers) for unit in plan_from_json(planned.plan).units) == 3


@pytest.mark.parametrize(
    ("fields", "code", "field", "words"),
    [
        ({"model_dir": "/nowhere"}, "INVALID_ARGUMENT", "model_dir", "/nowhere: there is no such folder"),
        ({"workers": 0, "policy": "replicate"}, "INVALID_ARGUMENT", "workers", "must be 1 or more"),
        ({"workers": -2}, "INVALID_ARGUMENT", "workers", "must be 1 or more"),
    ],
)
def test_bad_orders_are_refused(tiny_model: Path, fields: dict, code: str, field: str, words: str) -> None:
    refused = replan(order(tiny_model, **fields), [])
    assert isinstance(refused, PlanRefused)
    assert (refused.code, refused.field) == (code, field)
    assert words in refused.message


def test_the_served_folder_gone_is_no_fault_of_the_caller(tiny_model: Path) -> None:
    refused = replan(order(tiny_model / "gone"), [])
    assert isinstance(refused, PlanRefused)
    assert (refused.code, refused.field) == ("FAILED_PRECONDITION", "")
