"""Benchmark: the same script for a few steps under each strategy, one after the other, in the pods of one job.

`flk bench` starts ``python -m flk_plan.bench`` as the ranks of a job (__main__). Each rank starts a process for each
case: the script for some steps (script). The ranks meet in the store of their launcher between the cases (cases).
Nothing of the runtime imports the package.
"""
