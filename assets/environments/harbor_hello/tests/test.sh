#!/bin/sh
if grep -q hello greeting.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
