"""The operators. Importing this package registers them."""

from rayrft.pipelines.operators import (  # noqa: F401
    batches,
    clean,
    code_tests,
    columns,
    decontaminate,
    diversity,
    duplicates,
    filters,
    judged,
    juicer,
    priorities,
    rewriting,
    solving,
    synthesis,
)
