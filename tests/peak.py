"""How much memory tensors take."""

import torch


class Peak:
    """The most bytes that tensors on the host take at one time inside the block, beside those that were there before."""

    def __enter__(self):
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self.profiler.__enter__()
        return self

    def __exit__(self, *exception):
        self.profiler.__exit__(*exception)
        nodes, changes = list(self.profiler.profiler.kineto_results.experimental_event_tree()), []
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children)
            # A shard that is mapped and not allocated adds nothing to the total.
            if node.tag.name == "Allocation" and node.extra_fields.total_allocated:
                changes.append((node.start_time_ns, node.extra_fields.total_allocated, node.extra_fields.alloc_size))
        _, total, change = min(changes)
        self.bytes = max(total for _, total, _ in changes) - (total - change)
