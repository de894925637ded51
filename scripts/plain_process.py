"""What a process that loads a checkpoint for itself does, for comparison with a server."""

# Loads the checkpoint and touches every byte of it, as one token does. Its output says when to measure.
PEER = """
import sys, torch
from pathlib import Path
from safetensors.torch import load_file
torch.set_num_threads(1)
folder, convert = Path(sys.argv[1]), sys.argv[2] == "float32"
print("ready", flush=True)
sys.stdin.readline()
weights = {}
for file in sorted(folder.glob("model*.safetensors")):
    weights.update(load_file(file))
if convert:
    weights = {name: weight.float() for name, weight in weights.items()}
for weight in weights.values():
    weight.max()
print("loaded", flush=True)
sys.stdin.readline()
"""
