"""Hostile completions: a reward must judge each of them at once and execute none."""

HUGE = 10_000_000

HOSTILE: list[str] = [
    # towers of powers and very long arithmetic
    *(
        rf"\boxed{{{x}}}"
        for x in ("9**9**9", "9^9^9", "9^{9^{9^{9}}}", "10^{10^{10}}", "2^{99999999}", "99999999999!", "9!!!!!!")
    ),
    *(
        rf"\boxed{{{x}}}"
        for x in ("1e999999999", "0x" + "f" * 300, "9" * 300, "9" * 100_000, "1/0", r"\frac{1}{0}", "-" * 300 + "1")
    ),
    *(
        rf"\boxed{{{x}}}"
        for x in (
            r"\sum_{n=1}^{10^9} n",
            r"\prod_{k=1}^{99999} k",
            r"\int_0^{\infty} e^{-x^x} dx",
            r"\binom{99999}{500}",
        )
    ),
    *(
        rf"\boxed{{{x}}}"
        for x in ("x^{" * 40 + "1" + "}" * 40, r"\sqrt{" * 60 + "2" + "}" * 60, r"\frac{1}{" * 70 + "2" + "}" * 70)
    ),
    *(
        rf"\boxed{{{x}}}"
        for x in ("(" * 150 + "1" + ")" * 150, "+".join(f"x_{{{i}}}" for i in range(90)), "(a+b+c+d)^{999}")
    ),
    *(
        rf"\boxed{{{x}}}"
        for x in (r"\gcd(" + ",".join("123456789" for _ in range(30)) + ")", "x^{1000}-1=0", "0.(3)", "1,2,3,,,,4")
    ),
    *(
        rf"\boxed{{{x}}}"
        for x in (
            r"\binom{999999999}{499999999}",
            r"{999999999 \choose 499999999}",
            r"(99!)!",
            r"9^{99}!",
            r"\left(9^{99}\right)!",
            r"(a+b+c+d+e+f+g)^{99}",
            r"\left(\alpha+b+c+d+e+f+g\right)^{99}",
            r"\cos(" * 20 + "x" + ")" * 20,
        )
    ),
    # code
    r"\boxed{__import__('os').system('touch PWNED')}",
    r"\boxed{exec(\"open('PWNED','w')\")}",
    r"\boxed{eval('1+1')}",
    r"\boxed{().__class__.__bases__[0].__subclasses__()}",
    r"\boxed{lambda: 0}",
    r"\boxed{[x for x in range(10**9)]}",
    r"\boxed{open('/etc/passwd').read()}",
    r"\boxed{print(1)}",
    r"\boxed{globals()['__builtins__']}",
    r"\boxed{f'{__import__(\"os\")}'}",
    r"\boxed{sympify('__import__(\"os\")')}",
    r"\boxed{\input{/etc/passwd}}",
    r"\boxed{\write18{touch PWNED}}",
    r"\boxed{\def\x{\x\x}\x}",
    r"\boxed{'; import os; os.system('touch PWNED'); '}",
    # quotes, braces and escapes
    r"\boxed{" * 5000,
    r"\boxed{}",
    r"\boxed{{{{{{{",
    r"\boxed{}}}}}}}",
    r"\boxed{\}",
    r"\boxed{\\}",
    "\\boxed{\\" + "}" * 50,
    r'\boxed{"\"\'"}',
    r"\boxed{\u0000}",
    "\\boxed{\x00}",
    r"\boxed{\text{\text{\text{3}}}}",
    r"\boxed{\left(\right)\left[}",
    r"\boxed{$$$$$$}",
    r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 \end{pmatrix}}",
    r"\boxed{" + r"\begin{matrix}" * 30,
    # text that looks like a number
    "\\boxed{\u202e3\u202c}",
    "\\boxed{\u0663}",  # Arabic-Indic three
    "\\boxed{\uff13}",  # fullwidth three
    "\\boxed{3\u200b4}",
    "\\boxed{\U0001d7db}",  # a mathematical three
    "\\boxed{\ud800}",  # half a surrogate pair
    "\\boxed{З}",  # a Cyrillic letter
    # size
    "9" * HUGE,
    "\\boxed{" + "9" * HUGE + "}",
    "\\boxed{" + "{" * 100_000,
    "\\boxed{" + "{}" * 100_000 + "}",
    "#### " * 2_000_000,
    "#### " + "1," * 1_000_000,
    "a" * HUGE,
    "\n" * HUGE,
    "```python\n" * 200_000,
    "<think>" * 1_000_000,
    "",
    " ",
]
