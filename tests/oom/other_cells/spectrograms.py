# The spectrograms of many recordings at once.
# %%
waves = torch.randn(200, 16000, device="cuda")
hann = torch.hann_window(512, device="cuda")
# %%
spec = torch.stft(waves, n_fft=512, hop_length=128, window=hann, return_complex=True)
power = spec.abs() ** 2
log_power = torch.log(power + 1e-6)
