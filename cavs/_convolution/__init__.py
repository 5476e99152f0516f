"""Convolutions of 3 x 3 as tasks of one launch (MegaKernels): the public function, and the choice by measuring."""
