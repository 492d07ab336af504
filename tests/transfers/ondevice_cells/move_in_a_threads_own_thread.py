# A thread that a thread started.
# move: cpu -> simgpu:0, 1, 4000, ?, .to
import threading
def inner():
    x.to("simgpu:0")
def outer():
    thread = threading.Thread(target=inner)
    thread.start()
    thread.join()
thread = threading.Thread(target=outer)
thread.start()
thread.join()
