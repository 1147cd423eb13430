"""`kvxfer replay` with numbers that are none: each is one line that names it, exit status 2."""

import pytest

from kvxfer.cli import main

CHATS = ["--synthetic", "multi-turn", "--set", "requests=20"]
HUGE = "9" * 400
NONE = {
    "--bytes-per-token": [HUGE, "0", "-1"],
    "--tokens-per-block": [HUGE, "0", "-1"],
    "--prefill-tokens-per-s": ["1e-320", "nan", "inf", "-inf", "0", "1e308", HUGE],
    "--host-bandwidth": [HUGE, "0", "nan", "1e9", "-1"],
    "--file-bandwidth": [HUGE],
    "--object-bandwidth": [HUGE],
    "--capacities": [HUGE, "9" * 5000, "1." + HUGE, "0", "nan", "-1"],
    "--blocks": [HUGE, "9" * 5000, "0", "nan", "1.5", "-1", "\N{ARABIC-INDIC DIGIT THREE}"],
    "--budget": [f"host={HUGE}", f"file={HUGE}GiB", "host=nan", "host=-1"],
    "--fleet": [f"holders={HUGE}", "engines=1000000000000", "replicas=nan", "groups=-1"],
    "--set": [
        *("user_tokens=1000000000000", f"requests={HUGE}", "requests=1e18", "turns=1e308"),
        *("requests_per_s=1e-320", "requests_per_s=nan", "think_s=inf", "system_prompts=-1"),
    ],
    "--backend": [f"host://?capacity={HUGE}", "host://?capacity=nan", "host://?capacity=-1"],
}
CASES = [(option, value) for option, values in NONE.items() for value in values]


@pytest.mark.parametrize(("option", "value"), CASES, ids=[f"{o} {v[:20]}" for o, v in CASES])
def test_a_number_that_is_none_is_one_line_that_names_it(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = [*CHATS, "--bytes-per-token", "1000", "--prefill-tokens-per-s", "1000"]
    assert main(["replay", *usual, f"{option}={value}"]) == 2
    said = capsys.readouterr()
    assert not said.out
    (line,) = said.err.splitlines()
    name, _, number = value.rpartition("=")
    named = name or option.removeprefix("--")
    names = {named, named.replace("-", "_"), "size", "budget", "fleet", "set", "capacity"}
    assert any(f"{each} is " in line for each in names), line
    assert number[:20] in line or f"{float(number):g}"[:20] in line, line
