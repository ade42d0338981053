"""Who answers a schedule's requests: real processes, ranks in one process, or a pencil that only counts."""
