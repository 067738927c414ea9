"""The policies by name. A new one is a `Policy` with the same two signatures and one line in `POLICIES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from entrain_opt.assigner.auto import place_auto
from entrain_opt.assigner.exact import place_exact
from entrain_opt.assigner.joint import place_joint
from entrain_opt.assigner.pairwise import place_pairwise
from entrain_opt.assigner.peers import (
    place_dip,
    place_disttrain,
    place_dynapipe,
    place_in_order,
    place_karmarkar_karp,
    place_length_grouped,
    place_token_budget,
    split_by_encoder_work,
    split_by_length,
)
from entrain_opt.assigner.replica_split import split_jointly
from entrain_opt.assigner.replicas import split_by_llm_work, split_in_order, split_karmarkar_karp
from entrain_opt.assigner.settings import SearchSettings
from entrain_opt.assigner.work import Placement, SampleWork
from entrain_opt.assignment import IntArray
from entrain_opt.errors import AssignmentError


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How a global batch is split.

    Attributes:
        split: (global batch, number of replicas) -> [N] replica of each sample.
        place: (at least one sample of one replica, number of microbatches) -> placement. It may use fewer
            microbatches, and uses more only where the memory caps need it.
        search: likewise, for a policy that searches: it also takes how, and None for an open number of microbatches.
            A policy has either `place` or `search`.
    """

    split: Callable[[SampleWork, int], IntArray]
    place: Callable[[SampleWork, int], Placement] | None = None
    search: Callable[[SampleWork, int | None, SearchSettings], Placement] | None = None


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "auto": Policy(split=split_jointly, search=place_auto),
        "exact": Policy(split=split_jointly, search=place_exact),
        "joint": Policy(split=split_jointly, place=place_joint),
        "pairwise": Policy(split=split_by_llm_work, place=place_pairwise),
        "in_order": Policy(split=split_in_order, place=place_in_order),
        "karmarkar_karp": Policy(split=split_karmarkar_karp, place=place_karmarkar_karp),
        "length_grouped": Policy(split=split_by_length, place=place_length_grouped),
        "token_budget": Policy(split=split_by_length, place=place_token_budget),
        "dynapipe": Policy(split=split_karmarkar_karp, place=place_dynapipe),
        "disttrain": Policy(split=split_by_encoder_work, place=place_disttrain),
        "dip": Policy(split=split_in_order, place=place_dip),
    }
)


def find_policy(name: str) -> Policy:
    """The policy of that name.

    Raises:
        AssignmentError: there is none; the message lists the known ones.
    """
    if name not in POLICIES:
        raise AssignmentError(f"policy: expected one of {sorted(POLICIES)}, found {name!r}.")
    return POLICIES[name]
