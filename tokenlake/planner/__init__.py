"""Rules of the control plane: the prefix tree of some requests, the cost model, and plans for batches."""

from tokenlake.planner.choose import Decision, Way, choose
from tokenlake.planner.costs import Batch, Costs, Model, fetch_limit_s
from tokenlake.planner.fits import DecodeFit, PrefillFit, QueryFit, TransferFit
from tokenlake.planner.load import cache_load
from tokenlake.planner.plans import Plans, QueryPlan, TransferPlan, gen_plans
from tokenlake.planner.rates import Estimate, PeerRates, Rates
from tokenlake.planner.router import Prefill, Router, Start
from tokenlake.planner.tree import PrefixTree, Request, SegmentSequence, grow

__all__ = [
    "Batch",
    "Costs",
    "Decision",
    "DecodeFit",
    "Estimate",
    "Model",
    "PeerRates",
    "Plans",
    "Prefill",
    "PrefillFit",
    "PrefixTree",
    "QueryFit",
    "QueryPlan",
    "Rates",
    "Request",
    "Router",
    "SegmentSequence",
    "Start",
    "TransferFit",
    "TransferPlan",
    "Way",
    "cache_load",
    "choose",
    "fetch_limit_s",
    "gen_plans",
    "grow",
]
