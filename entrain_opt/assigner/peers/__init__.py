"""What other trainers and papers do, for comparison: one module per policy, all under this project's costs and caps.

Each follows the published algorithm, named in its docstring with what had to be filled in. Only `dip` lets the two
modules cut a microbatch differently; the others give encoder and language model the same split.
"""

from entrain_opt.assigner.peers.dip import place_dip
from entrain_opt.assigner.peers.disttrain import place_disttrain, split_by_encoder_work
from entrain_opt.assigner.peers.dynapipe import place_dynapipe
from entrain_opt.assigner.peers.in_order import place_in_order
from entrain_opt.assigner.peers.length_grouped import place_length_grouped, split_by_length
from entrain_opt.assigner.peers.level_total import place_karmarkar_karp
from entrain_opt.assigner.peers.token_budget import place_token_budget

__all__ = [
    "place_dip",
    "place_disttrain",
    "place_dynapipe",
    "place_in_order",
    "place_karmarkar_karp",
    "place_length_grouped",
    "place_token_budget",
    "split_by_encoder_work",
    "split_by_length",
]
