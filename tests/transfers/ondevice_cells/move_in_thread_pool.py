# A pool of threads.
# move: cpu -> simgpu:0, 4, 4000, ?, .to
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as pool:
    parts = list(pool.map(lambda part: part.to("simgpu:0"), x.chunk(4)))
