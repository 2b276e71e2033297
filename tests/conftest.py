import torch
from hypothesis import settings

torch.set_num_threads(1)
# The machines that run these tests are small and shared: a slow example is no bug.
settings.register_profile("flowrt", deadline=None, max_examples=60)
settings.load_profile("flowrt")
