"""Routes as columns, what the client makes of an engine's answer, the step's count, and what
configurations are refused."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from hybridflow.batch import FREE, with_free_end
from hybridflow.config import derived
from hybridflow.config.derived import num_experts
from hybridflow.config.schema import SamplingConfig
from hybridflow.engines.base import Extras
from hybridflow.engines.sglang.engine import EngineClient
from hybridflow.engines.sglang.server import server_arguments
from hybridflow.engines.spec import EngineSpec
from hybridflow.errors import EngineError, RouterReplayError
from hybridflow.trainer.groups import check_steps
from hybridflow.trainer.metrics import memory_metrics, replay_metrics
from hybridflow.trainer.records import over_roles
from tests.unit.config.small import found, small
from tests.unit.engines.stub import Stub, answer_of

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_the_last_token_of_an_engines_routes_is_free() -> None:
    routes = np.arange(5 * 6, dtype=np.int32).reshape(5, 6)
    column = with_free_end(routes, tokens=6, layers=3, what="engine 0")
    assert column.dtype == np.int16 and column.shape == (6, 3, 2)
    assert (column[:5].reshape(5, 6) == routes).all() and (column[5] == FREE).all()


@pytest.mark.parametrize(
    ("routes", "tokens", "layers"),
    [
        (np.zeros((5, 6)), 5, 3),
        (np.zeros((5, 6)), 6, 4),
        (np.zeros((5, 0)), 6, 1),
        (np.full((5, 6), -1), 6, 3),
    ],
)
def test_routes_that_do_not_fit_are_refused(routes: np.ndarray, tokens: int, layers: int) -> None:
    with pytest.raises(RouterReplayError, match="engine 0: "):
        with_free_end(routes.astype(np.int32), tokens, layers, "engine 0")


@pytest.fixture
def stub() -> Any:
    import threading

    server = Stub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


def test_the_client_asks_for_routes_only_when_told_to(stub: Any) -> None:
    routes = np.arange(4 * 6, dtype=np.int32)
    stub.answers_with(
        "/generate", [answer_of([5, 6], routed_experts=base64.b64encode(routes.tobytes()).decode())]
    )
    client = EngineClient(stub.url, "key of the stub", 5.0, name="e")
    [plain] = client.generate([[1, 2, 3]], SamplingConfig(), 4)
    [routed] = client.generate([[1, 2, 3]], SamplingConfig(), 4, extras=Extras(routes=True))
    assert (
        plain.routes is None
        and routed.routes is not None
        and routed.routes.tolist() == routes.reshape(4, 6).tolist()
    )
    client.close()
    assert (
        "return_routed_experts" not in stub.asked[0][1]
        and stub.asked[1][1]["return_routed_experts"] is True
    )


@pytest.mark.parametrize(
    "encoded", [None, base64.b64encode(np.zeros(7, np.int32).tobytes()).decode(), "", "*"]
)
def test_an_answer_without_usable_routes_is_an_error(stub: Any, encoded: str | None) -> None:
    stub.answers_with(
        "/generate", [answer_of([5, 6], **({} if encoded is None else {"routed_experts": encoded}))]
    )
    client = EngineClient(stub.url, "key of the stub", 5.0, name="e")
    with pytest.raises(EngineError, match="engine e: /generate returned a malformed event"):
        client.generate([[1, 2, 3]], SamplingConfig(), 4, extras=Extras(routes=True))
    client.close()


def test_engine_options_follow_the_spec() -> None:
    assert "enable-return-routed-experts" not in server_arguments(EngineSpec("e", "none"), 1)
    assert (
        server_arguments(EngineSpec("e", "none", return_routed_experts=True), 1)[
            "enable-return-routed-experts"
        ]
        is True
    )
    on_cpu, on_cuda = (
        server_arguments(EngineSpec("e", "none", memory_saver=True, device=kind), 1)
        for kind in ("cpu", "cuda")
    )
    assert "enable-memory-saver" not in on_cpu and on_cuda["enable-memory-saver"] is True


def observed(routers: int, **counts: int) -> dict[str, Any]:
    zeros = dict.fromkeys(("sent", "used", "mismatched", "differing", "drifted"), 0)
    return {"memory": {"update_policy": 3 * 10**9}, "routes": zeros | {"routers": routers} | counts}


PROMPTS = np.array([3, 4, 2])
RESPONSES = np.array([2, 0, 4])


@pytest.mark.parametrize(
    ("kind", "tokens", "shares"),
    [
        ("compare", 4 + 5, {"differing": 3 / 27}),
        ("r3", 3 * (4 + 5), {"differing": 3 / 27, "drifted": 6 / 54}),
        ("r2", 2 * (4 + 3 + 5), {"drifted": 6 / 72}),
    ],
)
def test_a_step_must_have_replayed_every_token_in_every_layer(
    kind: str, tokens: int, shares: dict[str, float]
) -> None:
    # two ranks that share the tokens, each with its stage's routers
    first = tokens * 3 - 4
    second = 4
    ranks = [
        observed(2, sent=first, used=first, differing=3, drifted=6),
        observed(1, sent=second, used=second),
    ]
    metrics = replay_metrics(ranks, PROMPTS, RESPONSES, kind, ppo_epochs=2)
    replayed = 0 if kind == "compare" else tokens * 3
    assert metrics == pytest.approx(
        {
            f"actor/router_replay/{name}": value
            for name, value in {"tokens": replayed, "mismatches": 0, **shares}.items()
        }
    )
    for broken in (
        {"sent": second, "used": second - 1},
        {"sent": 3, "used": 3},
        {"sent": second, "used": second, "mismatched": 1},
    ):
        with pytest.raises(
            RouterReplayError, match=f"actor.router_replay={kind}: {tokens * 3} token-layers"
        ):
            replay_metrics(
                [ranks[0], observed(1, **broken)], PROMPTS, RESPONSES, kind, ppo_epochs=2
            )


def test_what_a_conversation_shows_last_is_not_expected_to_have_experts() -> None:
    """An engine has read 4 and 2 tokens of the first two samples, and none of the third, which
    failed."""
    routed = np.array([4, 2, 0])
    # three layers; a pass for the old log-probabilities and two epochs
    sent = 3 * 3 * int(routed.sum())
    ranks = [observed(3, sent=sent, used=sent)]
    assert (
        replay_metrics(ranks, PROMPTS, RESPONSES, "r3", 2, routed)["actor/router_replay/tokens"]
        == sent
    )
    with pytest.raises(RouterReplayError):
        replay_metrics(ranks, PROMPTS, RESPONSES, "r3", 2)
    with pytest.raises(RouterReplayError):
        replay_metrics(ranks, PROMPTS, RESPONSES, "r3", 2, routed - 1)


def test_without_replay_there_is_no_metric_of_it() -> None:
    assert replay_metrics([observed(1)], PROMPTS, RESPONSES, "none", 1) == {}


def test_peaks_are_those_of_the_worst_rank() -> None:
    ranks = [
        {"memory": {"a": 2**30, "b": 2 * 2**30}, "reserved": 9 * 2**30, "offloaded": 10**9},
        {"memory": {"a": 4 * 2**30}, "reserved": 5 * 2**30, "offloaded": 3 * 10**9},
    ]
    expected = {
        "perf/max_memory_allocated_gb/a": 4.0,
        "perf/max_memory_allocated_gb/b": 2.0,
        "perf/max_memory_allocated_gb": 4.0,
    }
    expected |= {"perf/max_memory_reserved_gb": 9.0, "perf/offloaded_gb/critic": 3.0}
    assert memory_metrics(ranks, "critic") == expected
    assert memory_metrics([{"memory": {}, "reserved": 0, "offloaded": 0}], "critic") == {
        "perf/offloaded_gb/critic": 0.0
    }


def test_of_several_roles_the_largest_peak_counts() -> None:
    actor = {"perf/max_memory_allocated_gb": 4.0, "perf/offloaded_gb/actor": 1.0}
    critic = {"perf/max_memory_allocated_gb": 2.0, "perf/offloaded_gb/critic": 3.0}
    assert over_roles([actor, critic]) == over_roles([critic, actor]) == {**critic, **actor}


@pytest.mark.slow
def test_a_dense_model_has_nothing_to_replay() -> None:
    assert [
        num_experts(config)
        for config in ({}, {"num_experts": 0}, {"num_local_experts": 8}, {"n_routed_experts": 4})
    ] == [0, 0, 8, 4]
    assert found("actor.router_replay=r3") == []
    assert (
        "actor.router_replay=r2 requires a mixture of experts"
        in found("actor.router_replay=r2", "model=tiny-dense")[0]
    )
    switched_off = "rollout.extra_args={enable_return_routed_experts: false}"
    assert "remove it from rollout.extra_args" in found("actor.router_replay=r3", switched_off)[0]
    assert found("actor.router_replay=r2", switched_off) == []


@pytest.mark.parametrize(
    ("kind", "engine", "updates"),
    [("none", False, False), ("compare", True, False), ("r2", False, True), ("r3", True, True)],
)
def test_every_kind_finds_its_columns(kind: str, engine: bool, updates: bool) -> None:
    config = small(f"actor.router_replay={kind}")
    assert (derived.needs_engine_routes(config), derived.replays_routes(config)) == (
        engine,
        updates,
    )
    check_steps(config)
