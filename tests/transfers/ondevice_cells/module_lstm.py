# A recurrent layer moves.
# move: cpu -> simgpu:0, 4, 576, rnn, Module.to
rnn = torch.nn.LSTM(3, 4, device="cpu")
rnn.to("simgpu:0")
