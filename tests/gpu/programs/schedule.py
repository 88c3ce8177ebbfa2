"""What XLA runs when, read from a compiled module's text."""

import re


def schedule_of(text):
    """The module's computations that have calls of jax_ep, as lines of words with " | " between.

    Words: NAME> where a call of jax_ep on another stream starts (NAME as in operations.BESIDE) and
    <NAME where it is waited for; NAME where one runs in order; G for products, runs of them as 3G.
    """
    computations = dict(re.findall(r"\n(?:ENTRY )?%(\S+) \([^\n]*\{\n(.*?)\n\}", text, re.S))
    lines = [_words(body, computations) for body in computations.values()]
    scheduled = " | ".join(" ".join(words) for words in lines if any(">" in w for w in words))
    return re.sub(r"\b(?:G )+", lambda m: f"{len(m[0]) // 2}G ", scheduled + " ").strip()


def _words(body, computations):
    words, started = [], {}
    for line in body.split("\n"):
        found = re.match(r"\s+(?:ROOT )?%(\S+) = (?:\(.*?\)|\S+) ([a-z-]+)\(%?([\w.-]*)", line)
        if not found:
            continue
        name, opcode, operand = found.groups()
        if opcode.endswith("-start"):
            target = _target(line, computations)
            if target:
                started[name] = target
                words.append(f"{target}>")
        elif opcode.endswith("-done"):
            if operand in started:
                words.append(f"<{started[operand]}")
        elif opcode == "custom-call":
            target = re.search(r'custom_call_target="([^"]+)"', line)[1]
            if target.startswith("jax_ep_"):
                words.append(target.removeprefix("jax_ep_"))
            elif "gemm" in target or "triton" in target or "cublas" in target:
                words.append("G")
        elif opcode == "dot" or (opcode == "fusion" and re.search("gemm|dot|triton", line)):
            words.append("G")
    return words


def _target(line, computations):
    """The custom call of jax_ep that an asynchronous start wraps, or None."""
    for _ in range(3):  # a start calls a function that may call the custom call's own
        if target := re.search(r'custom_call_target="jax_ep_(\w+?)_beside"', line):
            return target[1]
        called = re.search(r"(?:to_apply|calls|called_computations)=\{?%([\w.-]+)", line)
        if not called:
            return None
        line = computations.get(called[1], "")
    return None


def beside(schedule, name):
    """Products between each start of `name` and its wait."""
    counts = []
    words = schedule.split()
    for i, word in enumerate(words):
        if word == f"{name}>":
            inside = words[i + 1 : words.index(f"<{name}", i)]
            counts.append(sum(int(w[:-1]) for w in inside if re.fullmatch(r"\d+G", w)))
    return counts
