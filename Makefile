# make demo    trains a classifier of digits on 4 ranks
# make test    runs every tier of tests that this machine can run
# make check   lint, format, types
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

.PHONY: demo test check
