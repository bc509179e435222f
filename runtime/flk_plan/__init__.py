"""Planning: predicts memory and time of a training script under each strategy, without a GPU and without its memory.

`python -m flk_plan` runs the script up to its first step on tensors without data (capture), records that step
block by block (trace), and predicts memory (state, predict), bytes on the wire (communication) and time (hardware) for
each strategy. `flk plan` starts it. Nothing of the runtime imports the package.
"""
