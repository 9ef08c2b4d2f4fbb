"""Child process of a dry run: a request on standard input, a `DryRun` or an error as JSON.

The answer is the last line of output.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Read the request, run it, print the answer."""
    import torch

    from shardwise.dryrun.dry_run import DryRunRequest, answer
    from shardwise.errors import UserError

    torch.set_num_threads(1)
    request = DryRunRequest.model_validate_json(sys.stdin.read())
    try:
        builder = request.source.builder()
    except UserError as error:
        import json

        print(json.dumps({"error": type(error).__name__, "problems": list(error.problems)}))
        return
    options = request.model_dump(include={"optimizer", "clip_norm", "rank", "extrapolate"})
    print(answer(builder, request.plan, **options), flush=True)


if __name__ == "__main__":
    main()
