"""The backend "ipc": how its ranks find each other's GPUs, its plan, its workspace and its launches."""
