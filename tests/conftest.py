import torch

# Test processes run side by side: more threads than cores would spend their time waiting for each other.
torch.set_num_threads(1)
