"""The paper's claims, tested: experiments, their report, and the choice of the shipped weights."""
