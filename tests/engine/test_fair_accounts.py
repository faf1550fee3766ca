"""What a tenant is charged, through the whole core: for its prompts once and for what is put out, whatever
steps that took. `test_fair_policy.py` has the policy alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest
from loraplex_engine.policies import FairPolicy, max_charge
from loraplex_engine.policies.fair import INPUT_WEIGHT, OUTPUT_WEIGHT
from loraplex_engine.protocol import Generate, Grammar
from loraplex_engine.speculative import Drafter
from loraplex_engine.structured.mask_budget import MaskBudget

from tests.support.choice_outcomes import collect_choices
from tests.support.engine_fakes import VOCAB_SIZE, FakeEngine, make_engine, make_request
from tests.support.grammars import ListGrammars
from tests.support.oracle_drafts import Oracle, choices_of

PROMPT = list(range(1, 11))
LONG = json.dumps([list(range(10, 40))])


@dataclass
class Run:
    """Requests served to the end under the fair policy."""

    engine: FakeEngine
    policy: FairPolicy
    num_outputs: dict[str, int]  # by request id

    def charged(self, tenant: str) -> float:
        return self.policy._classes[0].accounts[tenant].counter


def serve(*requests: Generate, **how: object) -> Run:
    policy = FairPolicy(1e9)
    engine = make_engine(policy=policy, **how)  # type: ignore[arg-type]  # by name
    for request in requests:
        engine.core.add(request)
    outcomes = collect_choices(engine.run())
    engine.assert_idle()
    outputs = {name: outcome.usage.completion_tokens for name, outcome in outcomes.items()}
    return Run(engine, policy, outputs)


def drafting(*requests: Generate, lie_every: int) -> Drafter:
    choices = [choice for request in requests for choice in choices_of(request)]
    return Drafter(Oracle(choices, lie_every), 4)


def dear(num_prompt: int, num_output: int) -> float:
    return INPUT_WEIGHT * num_prompt + OUTPUT_WEIGHT * num_output


@pytest.mark.parametrize("lie_every", [0, 1, 3])
def test_drafts_are_charged_where_they_are_put_out_and_not_where_they_are_rejected(
    lie_every: int,
) -> None:
    request = make_request(prompt=PROMPT, max_tokens=20)
    plain = serve(request)

    run = serve(request, drafter=drafting(request, lie_every=lie_every))

    assert run.engine.core.stats().spec_draft_tokens_total > 0
    assert run.charged("t") == plain.charged("t") == dear(10, 20)


def test_what_is_computed_anew_after_a_preemption_is_not_charged_again() -> None:
    requests = [
        make_request(f"r{n}", [n + 1] * 4, max_tokens=16, tenant=f"t{n}", seed=n) for n in range(3)
    ]

    run = serve(*requests, num_blocks=9)

    assert run.engine.core.stats().num_preemptions_total > 0
    assert [run.charged(f"t{n}") for n in range(3)] == [dear(4, 16)] * 3


@pytest.mark.parametrize("max_tokens", [1, 5])
@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_choices_are_charged_their_prompt_once_and_a_token_of_it_each(
    has_prefix_cache: bool, max_tokens: int
) -> None:
    """Also where the first one is gone before the others begin."""
    run = serve(
        make_request(prompt=PROMPT, n=4, max_tokens=max_tokens), has_prefix_cache=has_prefix_cache
    )

    assert run.charged("t") == dear(10 + 3, 4 * max_tokens)


def test_a_row_that_is_left_out_for_its_tenants_masks_is_charged_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its time is `mask_budget`'s; its account is that of a row that was never left out."""
    turns: list[bool] = []

    def is_open(budget: MaskBudget, tenant_id: str) -> bool:
        turns.append(tenant_id != "masked" or len(turns) % 3 == 0)
        return turns[-1]

    monkeypatch.setattr(MaskBudget, "is_open", is_open)
    masked = make_request("masked", PROMPT, max_tokens=12, tenant="masked")
    masked = msgspec.structs.replace(
        masked,
        sampling=msgspec.structs.replace(
            masked.sampling, grammar=Grammar(kind="regex", value=LONG)
        ),
    )
    free = make_request("free", PROMPT, max_tokens=40, tenant="free")

    run = serve(masked, free, grammars=ListGrammars(VOCAB_SIZE))

    assert run.engine.core.stats().grammar_deferrals_total > 10
    assert run.num_outputs == {"masked": 12, "free": 40}
    assert (run.charged("masked"), run.charged("free")) == (dear(10, 12), dear(10, 40))


@pytest.mark.parametrize("lucky", [lambda n: "a", lambda n: "ab"[n % 2]], ids=["one", "both"])
def test_a_tenant_whose_drafts_come_true_gets_no_more_than_its_share(
    lucky: Callable[[int], str],
) -> None:
    """Two tenants with everything to ask: the accounts stay as close as without drafts, though one gets
    up to five tokens a step where the other gets one.
    """
    requests = [
        make_request(f"{tenant}{n}", [n + 1] * 5, max_tokens=12, tenant=tenant, seed=n)
        for n in range(12)
        for tenant in "ab"
    ]
    true = {
        request.request_id
        for n in range(12)
        for request in requests[2 * n : 2 * n + 2]
        if request.tenant_id == lucky(n)
    }

    class Lucky(Oracle):
        def _propose(self, ask: object) -> list[int]:
            drafts = super()._propose(ask)  # type: ignore[arg-type]
            is_true = self.requests[ask.key].request_id in true  # type: ignore[attr-defined]
            return drafts if is_true else [(draft + 1) % VOCAB_SIZE for draft in drafts]

    bound = max_charge(max_model_len=17, max_num_seqs=2, num_kv_tokens=256, is_reserving=False)
    policy = FairPolicy(1e9, most_charged=bound)
    engine = make_engine(policy=policy, max_num_seqs=2, drafter=Drafter(Lucky(requests), 4))
    for request in requests:
        engine.core.add(request)
    engine.run()

    stats = engine.core.stats()
    assert stats.spec_accepted_tokens_total > 50
    assert 0 < stats.service_gap <= stats.service_gap_promised <= bound
    accounts = policy._classes[0].accounts
    assert accounts["a"].counter == accounts["b"].counter == 12 * dear(5, 12)
