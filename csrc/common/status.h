// What every function of the C interfaces returns.
#pragma once

enum bnb_status {
  BNB_OK = 0,
  BNB_INVALID_ARGUMENT = 1,    // a size is negative, or an enumeration or a blocksize has no such value
  BNB_UNKNOWN_TARGET = 2,      // no such target in this build, or this machine cannot run it
  BNB_OUT_OF_MEMORY = 3,       // scratch memory could not be had; the outputs are undefined
  BNB_INDEX_OUT_OF_RANGE = 4,  // an index points past the table; nothing was written
};
