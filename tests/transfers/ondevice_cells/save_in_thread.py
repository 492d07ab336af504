# Saved in a thread.
# move: simgpu:0 -> cpu, 1, 128, ?, torch.save
import io, threading
thread = threading.Thread(target=lambda: torch.save(g, io.BytesIO()))
thread.start()
thread.join()
