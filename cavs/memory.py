"""Training within a budget of memory: what a derivative keeps of the forward pass, and batches in parts."""

from cavs._memory.bytes import BudgetError as BudgetError, bytes_of as bytes_of
from cavs._memory.fit import Verified as Verified
from cavs._memory.plan_batch import BatchPlan as BatchPlan, load as load, plan as plan
from cavs._memory.search import fewest_parts as fewest_parts
from cavs._memory.sub_batches import deal as deal, sub_batched as sub_batched
from cavs._remat.echo import Plan as Plan, Recomputed as Recomputed, recompute as recompute
