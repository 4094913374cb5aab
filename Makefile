# make demo          trains a classifier of digits on 4 ranks
# make test          runs every tier of tests that this machine can run
# make test-cuda12   runs those that use CUDA with the Python bindings and the compiler of CUDA 12.9, in .venv-cuda12
# make check         lint, format, types
# make docs          builds docs/ into docs/_build, in .venv-docs; warnings are errors
#
# Each first makes .venv and installs what it needs and this machine can use. To use what is installed already:
#     make test PYTHON=python3 VENV=
# To use an MPI of your own:
#     make test MPIRUN=/opt/openmpi/bin/mpirun
PYTHON ?= python3
VENV ?= .venv
MPIRUN ?=
export MPIRUN

demo test check:
	@$(PYTHON) -m tests.run $@ $(if $(VENV),--venv "$(VENV)")

test-cuda12:
	@$(PYTHON) -m tests.run $@ $(if $(VENV),--venv "$(VENV)-cuda12")

docs:
	@$(PYTHON) -m tests.run $@ $(if $(VENV),--venv "$(VENV)-docs")

.PHONY: demo test test-cuda12 check docs
