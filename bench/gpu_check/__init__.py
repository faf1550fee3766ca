"""`make gpu-check`: what only a GPU can tell, in under five minutes, as one table and as JSON.

Self-contained: this repository, torch, triton, numpy and the wheels of deploy/gpu-requirements.txt; no network, no
model files (weights are random), no tests. Each part runs in a process of its own with a time limit, so that one
that fails or hangs costs the others nothing; what it measured until then is kept.

`--rehearse` runs every part on a CPU at tiny sizes with interpreted kernels: its figures mean nothing, but every
line has run before a GPU sees it.
"""
