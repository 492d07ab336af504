# A thread of the cell.
# move: cpu -> simgpu:0, 1, 4000, ?, .to
import threading
def work():
    global y
    y = x.to("simgpu:0")
thread = threading.Thread(target=work)
thread.start()
thread.join()
