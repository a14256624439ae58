"""Research: code behind the papers' tables and benchmarks, kept beside the package and not in the wheel.

Nothing in `src/atoll` imports this. Benchmarks (`python -m benchmarks.NAME`), `tools/` and tests do, from the
root of a checkout. Its own tests are in `tests/research` and run in `make test-full`.

joint/       GH/AGH's problem: its instances, the proven optimum, stage 2, robust and rolling plans
cells/       the exact mixture of cells, against which the Cornserve paper's algorithm is held
operating/   operation in virtual time, checked: windows event by event, demand as a walk, forecasts scored
fitting/     constants of GPUs from times of whole layers
speech/      word errors of transcripts
"""
