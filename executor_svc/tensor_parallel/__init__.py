"""One executor over several ranks: processes that share its weights and its pool.

    octavo executor --tensor-parallel-size N (`launcher.py`), or torchrun
      ├─ rank 0   gRPC ─> device thread ─> Leader ──┬─> Executor: its share of heads and pool
      └─ rank i                       Follower ─────┴─> Executor: its share of heads and pool

The scheduler sees one executor. Each rank holds a share of every layer, cut by transformers'
tensor parallel plan, and the K/V of its own heads, under the same block ids: so plans, block
tables, copies and swaps are the same in all ranks, and a block is as many times smaller.

* Rank 0 hands every plan on as it came, one message over gloo (`link.py`), before it carries it
  out. The other ranks carry out the same plans in the same order (`follower.py`).
* Within a step, ranks meet where the model's plan says (gloo on a CPU, NCCL on a GPU): a sum
  after attention and one after the MLP of each layer, and the logits.
* Only rank 0 draws. Its tokens go to the others, device to device: no two ranks can ever go on
  with different ones, whatever their arithmetic does.
* What can be known before the forward pass (a plan that breaks the protocol, a K/V slot that is
  another's) is found by all ranks alike and is the step's error, as with one rank. What happens
  to one rank alone, in the middle of a step, ends all of them: its peers wait in a sum that it
  will never join. The scheduler then goes on elsewhere, or when the executor is back.
* The death of a rank is noticed by every other one within a second (`watch.py`), also while
  it waits for a device, and ends it with status 1.
* An audit compares the row tables of all ranks.
"""
