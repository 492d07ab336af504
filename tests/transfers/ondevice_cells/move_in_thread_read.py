# Values read in a thread.
# move: simgpu:0 -> cpu, 3, 12, ?, .item
import threading
thread = threading.Thread(target=lambda: [g[0, i].item() for i in range(3)])
thread.start()
thread.join()
