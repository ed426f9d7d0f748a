"""One torch thread in every test: tests run side by side, and a bit must not depend on the number of cores."""

import torch

torch.set_num_threads(1)
