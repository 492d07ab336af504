"""The only code that touches drivers, torch and the garbage collector. Probes return records; they never format.

By magic, each with the module to start reading at:

`%gpuinfo`    `gpus` joins what `cards` asks NVML (one question a field in `card_readings`, over `nvml`) with
              `torch_names` (by `visibility` before CUDA is up, by `cuda_in_use` after), `processes` and
              `other_devices`; `unified` knows memory that is the host's, `absence` why there is no GPU.
`%devices`    `tensors` scans; `storages` says what each occupies, `kinds` and `gradients` what it is for, `paths`
              and `holders` who keeps it (`libraries` what installed modules keep too), `spelling` how to type the
              way there; `cycles` finds what only awaits the gc, `graphs` what autograd keeps;
              `reconcile` and `history` account for the allocator's bytes. `identity` tells storages apart from one
              look to the next, `why` follows `references` to every holder of one tensor, `held` lets go of
              `outputs` and the `last_error`.
`%%ondevice`  `recording` chooses between exchanged functions (`entry_points` puts `stand_ins` in their place, unless
              `hindrances`, some of which `function_holders` knows, stand in the way) and a mode (`device_mode`);
              `watched_calls` lists the functions whose calls `placing`, `moving`, `reading` and `indexing` handle for
              a run's `recorder`, `runs` knows for whose run a thread works, `returning` sees gradients flow back
              through moves, `tracing` is the mode of --trace and --strict, `storage_copies` sees what they cannot,
              `transfers` is their log, `call_sites` finds lines, `moved` what moved before, `residents` what stayed
              behind in `watched_code`; `failed_line` reads the `operands` of a failure.
              (`gpumagic.transfers.move` moves what `--move` names.)
`%%oomguard`  `oom` recognises, `scene` reads the failed frames, `release` empties them, `surroundings` looks at
              what is left, `claims` prices each name; `instant` says what filled the device (from inside CUDA's
              allocator by `oom_observer`); `rollback` puts back what a run changed before the next.
Shared        `allocator`, torch's own figures for any backend; `segments`, where its blocks lie; `anatomy`,
              `callables`, `calls` and `openers`, looking inside objects without running their code; `frames`, whose a
              frame is and its variables; `host`, the machine's memory.
"""
