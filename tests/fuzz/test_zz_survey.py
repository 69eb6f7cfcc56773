import sys, time, collections, re, warnings, json

warnings.simplefilter("ignore")
from pathlib import Path
import hypothesis
from hypothesis import given, settings, Phase, HealthCheck
import pytest
from tests.fuzz.bodies import *
from tests.fuzz.oracle import check_answer
from tests.fuzz.test_bodies import tidy_up
from tests.fuzz.exploring import ServerGone

SECS = float(__import__("os").environ.get("S", "60"))
SEED = __import__("os").environ.get("SEED", "0")


def test_survey(fuzzed):
    found = collections.OrderedDict()
    why = collections.Counter()
    good = collections.Counter()
    slow = []
    gen = 0

    @settings(
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        max_examples=200,
    )
    @given(sent=requests)
    def t(sent):
        a = fuzzed.ask(sent)
        if a is None:
            if sent.is_whole:
                found.setdefault(("none", sent.path), []).append(sent)
            return
        if a.elapsed_s > 1:
            slow.append((a.elapsed_s, sent.path, sent.body[:300], a.status))
        if a.status >= 400 and a.kind == "application/json" and sent.method == "POST":
            why[(sent.path.strip("/"), re.sub(r"\d+", "#", a.json()["error"]["message"])[:70])] += 1
        if a.status == 200:
            good[sent.path.strip("/")] += 1
        if a.status == 200:
            tidy_up(fuzzed, sent)
        try:
            check_answer(sent, a)
        except Exception as e:
            key = (a.status, type(e).__name__, re.sub(r"\d+", "#", str(e))[:150])
            found.setdefault(key, []).append((sent, str(a)[:400], str(e)[:300]))

    end = time.monotonic() + SECS
    b = 0
    try:
        while time.monotonic() < end:
            hypothesis.seed(f"{SEED}/{b}")(t)
            t()
            b += 1
            fuzzed.check()
    finally:
        print("\nBATCHES", b, "asked", fuzzed.num_asked, dict(sorted(fuzzed.statuses.items())))
        for k, v in found.items():
            print("=====", len(v), k)
            s = min(v, key=lambda x: len(str(x)))
            print(str(s)[:1200])
        print("GOOD", good.most_common())
        print("WHY")
        [print(n, k) for k, n in why.most_common(70)]
        print("SLOW", sorted(slow, reverse=True)[:15], len(slow))
        log = fuzzed.server.log
        tb = collections.Counter(
            re.findall(r"^(\w+(?:\.\w+)*(?:Error|Exception|Warning)[^\n]{0,120})", log, re.M)
        )
        print("LOG", tb.most_common(40))
        Path("/tmp/survey.log").write_text(log)
