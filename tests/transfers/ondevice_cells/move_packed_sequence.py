# A packed sequence.
# move: cpu -> simgpu:0, 1, 20, -, .to
from torch.nn.utils.rnn import pack_padded_sequence
packed = pack_padded_sequence(torch.ones(3, 2, 1, device="cpu"), torch.tensor([3, 2], device="cpu"))
there = packed.to("simgpu:0")
