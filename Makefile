# make demo          trains a classifier of digits on 4 ranks
# make quick         runs the quick tests and one scenario of each file, in about a minute
# make test          runs every tier of tests that this machine can run, in about 20 minutes on 2 cores
# make coverage      runs the same tests and counts the branches of the package that they reach
# make limits        compares the processor time of the last make test with the kept one
# make test-pythons  runs the tiers unit and mpi on every Python from 3.10 to 3.15 that this machine has or uv gets
# make test-cuda12   runs the tests that CUDA 12.9's bindings or compiler can change, in .venv-cuda12
# make failures      kills, stops and ends ranks at random moments, and shows what the others hear
# make fuzz          runs random programs, calls and bytes, ranks that die, and a soak; FUZZ=10 runs ten times as many
# make models        searches models of the protocols for wrong states with Spin, and that it finds deliberate breaks
# make mutants       makes deliberate faults in a copy of the tree, and shows which test finds each
# make sanitizers    runs every kernel under the four tools of compute-sanitizer, on two ranks of one GPU
# make sass          compiles every kernel for every GPU that NVRTC knows, and looks for packets that are not one access
# make check         lint, format, types
# make serving       fetches the newest vLLM and SGLang, checks that our class fits their calls, and runs their groups
# make serve-vllm    runs vLLM with ipcreduce, with its own all-reduce and with NCCL on two GPUs, and compares them
# make pictures      draws the pictures of README.md and docs/ anew, from the results in benchmarks/results
# make docs          builds docs/ into docs/_build, in .venv-docs; warnings are errors
# make release       builds wheel and sdist into dist/, checks them, and tries the wheel in a fresh environment
#
# Each first makes .venv and installs what it needs and this machine can use. To use what is installed already:
#     make test PYTHON=python3 VENV=
# To use an MPI of your own:
#     make test MPIRUN=/opt/openmpi/bin/mpirun
PYTHON ?= python3
VENV ?= .venv
MPIRUN ?=
export MPIRUN

demo quick test coverage failures fuzz mutants sanitizers sass serving check pictures:
	@$(PYTHON) -m tests.tools.run $@ $(if $(VENV),--venv "$(VENV)")

test-cuda12:
	@$(PYTHON) -m tests.tools.run $@ $(if $(VENV),--venv "$(VENV)-cuda12")

test-pythons:
	@$(PYTHON) -m tests.tools.run $@ --venv "$(or $(VENV),.venv)"

docs release:
	@$(PYTHON) -m tests.tools.run $@ $(if $(VENV),--venv "$(VENV)-$@")

models serve-vllm:
	@$(PYTHON) -m tests.tools.run $@

limits:
	@$(PYTHON) -m tests.tools.times

.PHONY: demo quick test coverage limits test-pythons test-cuda12 failures fuzz mutants sanitizers sass serving check pictures docs release models serve-vllm
