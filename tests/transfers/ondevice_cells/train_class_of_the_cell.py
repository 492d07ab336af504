# Moves inside a module's forward.
# move: cpu -> simgpu:0, 1, 4000, inputs, .to
class Net(torch.nn.Module):
    def forward(self, inputs):
        return inputs.to("simgpu:0") + 1
out = Net()(x)
