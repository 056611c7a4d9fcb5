"""Prints, per operator, how often this library agrees with CANN's checks, and where it does not."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict

from device_rules.verdicts import OPERATORS, Answer, answers


def main(operators: list[str]) -> None:
    agree, here, total = Counter[str](), Counter[str](), Counter[str]()
    for operator in operators or OPERATORS:
        classes: dict[str, list[Answer]] = defaultdict(list)
        for answer in answers(operator):
            total[operator] += 1
            agree[operator] += answer.agrees
            here[operator] += not answer.accepted_there and answer.error_here is None
            if not answer.agrees:
                classes[answer.rule].append(answer)
        for rule, found in sorted(classes.items(), key=lambda item: -len(item[1])):
            devices = Counter(answer.device for answer in found)
            print(f"{len(found):5} {operator}: {rule[:300]}")
            print(f"      {dict(devices)}")
            print(f"      {json.dumps(found[0].parameters.arguments)[:1500]}")
    print(f"\n{'operator':<40} {'verdicts':>9} {'agree':>7} {'only here':>10}")
    for operator in [*total, "all"]:
        if operator == "all":
            numbers = total.total(), agree.total(), here.total()
        else:
            numbers = total[operator], agree[operator], here[operator]
        verdicts, agreed, only_here = numbers
        print(f"{operator:<40} {verdicts:9} {agreed:7} {only_here:10}")


if __name__ == "__main__":
    main(sys.argv[1:])
