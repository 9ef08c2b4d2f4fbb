#!/bin/bash
cd "$(dirname "$0")"
python example.py --epochs 3  # fault
